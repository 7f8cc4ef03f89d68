// A decode step of attention (flash_decode_step.cuh) without clusters: a block has a key head of a
// sequence. T is the dtype; HEAD_DIM is that of the tiles, a multiple of 64; ARCH is the compute
// capability.
#include "flash_decode_step.cuh"

template <typename T, int HEAD_DIM, int ARCH>
__global__ void __launch_bounds__(DECODE_THREADS, decode_blocks(HEAD_DIM))
    flash_decode(const __grid_constant__ FlashDecodeParams params) {
  decode_step<T, HEAD_DIM, 1, ARCH>(params);
}
