// Converts the accumulator of dQ after the sm_90 backward kernels: dQ = scale * dq_accum, from
// float32 in the order of dq_fragment_offset() to rows of 16-bit values. A block handles 64 rows of
// one head, a warpgroup 64 columns of them. Nothing is shared between threads, and the time is that
// of memory.
#include "bwd_block_sm90.cuh"
#include "store_rows.cuh"

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(ceil_div(HEAD_DIM, 64) * WARPGROUP)
    flash_bwd_postprocess_sm90(const __grid_constant__ FlashBwdParams params) {
  const AttentionShape& shape = params.shape;
  const Tile tile =
      tile_of_block(blockIdx.x, ceil_div(shape.seqlen_q, 64), shape.heads_q, shape.batch, 1);
  const Sequence sequence = load_sequence(params, tile.batch);
  const int m_begin = tile.block * 64;
  if (m_begin >= sequence.seqlen_q) return;

  const int column = threadIdx.x / WARPGROUP * 64;
  const float* dq_accum =
      params.dq_accum + (tile.head * params.accum_rows + sequence.accum_start + m_begin) * HEAD_DIM;
  float acc[8][4];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float4 x = {};
    if (column + n * 8 < HEAD_DIM) {
      x = *reinterpret_cast<const float4*>(dq_accum + dq_fragment_offset(column / 8 + n));
    }
    acc[n][0] = shape.scale * x.x;
    acc[n][1] = shape.scale * x.y;
    acc[n][2] = shape.scale * x.z;
    acc[n][3] = shape.scale * x.w;
  }

  const int row = m_begin + threadIdx.x % WARPGROUP / 32 * 16;  // first of the warp's 16
  T* dq = static_cast<T*>(params.dq) +
          params.dq_strides.at(tile.batch, sequence.start_q + row, tile.head) + column;
  store_rows(dq, params.dq_strides.row, acc, sequence.seqlen_q - row, shape.head_dim - column);
}
