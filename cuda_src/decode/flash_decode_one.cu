// A decode step of attention as in flash_decode.cu, for one sequence (flash_decode_one.cuh).
#include "flash_decode_one.cuh"

template <typename T, int HEAD_DIM, int ROWS, int ARCH>
__global__ void __launch_bounds__(DECODE_THREADS, decode_blocks(HEAD_DIM, ROWS))
    flash_decode_one(const __grid_constant__ FlashDecodeParams params) {
  using Block = DecodeBlock<T, SAME, HEAD_DIM, ROWS, ARCH, ROWS>;
  __shared__ typename Block::Storage storage;
  decode_one<Block>(params, storage);
}
