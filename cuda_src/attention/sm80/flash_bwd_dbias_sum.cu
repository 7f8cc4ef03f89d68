// dbias, where several blocks of flash_bwd_dbias_sm80.cu have divided the sequences: the sum of
// their shares, in float32 and in a fixed order. A thread has one element.
#include "../params.cuh"

template <int NUM_WARPS>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    flash_bwd_dbias_sum(const __grid_constant__ FlashBwdParams params) {
  const AttentionShape& shape = params.shape;
  const int heads = params.dbias_strides.head ? shape.heads_q : 1;
  const int64_t size = int64_t(heads) * shape.seqlen_q * shape.seqlen_k;
  const int64_t index = int64_t(blockIdx.x) * NUM_WARPS * 32 + threadIdx.x;
  if (index >= size) return;
  float sum = 0.f;
#pragma unroll 8
  for (int share = 0; share < shape.group_shares; ++share) {
    sum += params.dkv_partial[share * size + index];
  }
  params.dbias[index] = sum;
}
