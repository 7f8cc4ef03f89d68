// Packs a key mask to bits, and writes the record through which a kernel reads them together with
// the address of the bias (mask_record.cuh). One block has one sequence: each warp reads 32 keys at
// a time and one vote of its lanes makes a word. The block also counts the keys up to the last one
// that is seen, so that the forward pass can leave out the tiles behind it.
#include "mask_record.cuh"

struct MaskRecordParams {
  const uint8_t* mask;  // [batch, seqlen_k], nonzero where the queries see the key
  const void* bias;     // or null
  MaskRecord* record;
  int* seqused_k;  // [batch]
  int64_t batch_stride;
  int64_t key_stride;
  int64_t words;
  int seqlen_k;
  int trim;  // whether seqused_k ends behind the last key that is seen, or at seqlen_k
};

template <int NUM_WARPS>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    mask_record(const __grid_constant__ MaskRecordParams params) {
  __shared__ int end;
  if (threadIdx.x == 0) {
    end = params.trim ? 0 : params.seqlen_k;
    if (blockIdx.x == 0) {
      params.record->bias = params.bias;
      params.record->words = params.words;
    }
  }
  __syncthreads();  // `end` has its first value

  // The record's own field is not read here, because another block may not have written it yet.
  uint32_t* bits = reinterpret_cast<uint32_t*>(params.record + 1) + blockIdx.x * params.words;
  const uint8_t* mask = params.mask + blockIdx.x * params.batch_stride;
  for (int word = threadIdx.x / 32; word < params.words; word += NUM_WARPS) {
    const int key = word * 32 + threadIdx.x % 32;
    const bool seen = key < params.seqlen_k && mask[key * params.key_stride];
    const uint32_t votes = __ballot_sync(0xffffffffu, seen);
    if (threadIdx.x % 32 == 0) {
      bits[word] = votes;
      if (votes) atomicMax(&end, word * 32 + 32 - __clz(votes));
    }
  }
  __syncthreads();  // all warps have seen their keys
  if (threadIdx.x == 0) params.seqused_k[blockIdx.x] = end;
}
