// Converts the accumulator of dQ after flash_bwd_simt.cu: from rows of HEAD_DIM floats
// to rows of T with any strides. A block handles BLOCK_M rows of one head, one
// element a thread. Nothing is shared between threads, and the time is that of memory.
#include "../common/convert.cuh"
#include "block_info.cuh"
#include "tile_order.cuh"

constexpr int THREADS = 256;
constexpr int BLOCK_M = 32;

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(THREADS)
    flash_bwd_postprocess_simt(const __grid_constant__ FlashBwdParams params) {
  const AttentionShape& shape = params.shape;
  const Tile tile =
      tile_of_block(blockIdx.x, ceil_div(shape.seqlen_q, BLOCK_M), shape.heads_q, shape.batch, 1);
  const Sequence sequence = load_sequence(params, tile.batch);
  const int m_begin = tile.block * BLOCK_M;
  const int m_rows = min(BLOCK_M, sequence.seqlen_q - m_begin);

  const float* dq_accum =
      params.dq_accum + (tile.head * params.accum_rows + sequence.accum_start + m_begin) * HEAD_DIM;
  T* dq = static_cast<T*>(params.dq) +
          params.dq_strides.at(tile.batch, sequence.start_q + m_begin, tile.head);
#pragma unroll 4
  for (int i = threadIdx.x; i < m_rows * HEAD_DIM; i += THREADS) {
    const int row = i / HEAD_DIM, column = i % HEAD_DIM;
    if (column < shape.head_dim)
      dq[row * params.dq_strides.row + column] = from_float<T>(dq_accum[i]);
  }
}
