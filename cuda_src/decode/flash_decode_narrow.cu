// A decode step of attention as in flash_decode.cu, to a cache of 8 bits (KIND, narrow.cuh) with
// scales, which is converted in registers (flash_decode_narrow.cuh). The new tokens, which are
// rounded like all others, are in the cache before: `k` and `v` of the parameters are the scales.
#include "flash_decode_block.cuh"

template <typename T, int HEAD_DIM, int ROWS, int ARCH, int KIND>
__global__ void __launch_bounds__(DECODE_THREADS, decode_blocks(HEAD_DIM, ROWS))
    flash_decode_narrow(const __grid_constant__ FlashDecodeParams params) {
  __shared__ DecodeStorage<KIND, HEAD_DIM, ROWS> storage;
  decode_step<DecodeBlock<T, KIND, HEAD_DIM, ROWS, ARCH>>(params, storage);
}
