// Converts the accumulator of dQ after flash_bwd_simt.cu: from rows of HEAD_DIM floats
// to rows of T with any strides. A block handles BLOCK_M rows of one head, one
// element a thread. Nothing is shared between threads, and the time is that of memory.
#include "../../common/convert.cuh"
#include "../dq_rows.cuh"

constexpr int THREADS = 256;
constexpr int BLOCK_M = 32;

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS)
    flash_bwd_postprocess_simt(const __grid_constant__ FlashBwdParams params) {
  const DqRows rows = dq_rows_of_block<HEAD_DIM, BLOCK_M>(params);
  T* dq = static_cast<T*>(params.dq) + rows.place;
#pragma unroll 4
  for (int i = threadIdx.x; i < rows.count * HEAD_DIM; i += THREADS) {
    const int row = i / HEAD_DIM, column = i % HEAD_DIM;
    if (column < params.shape.head_dim)
      dq[row * params.dq_strides.row + column] = from_float<T>(rows.accum[i]);
  }
}
