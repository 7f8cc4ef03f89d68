// Converts the accumulator of dQ after flash_bwd_fp16x3.cu: dQ = scale * dq_accum without the
// scales of dS and K, from the order of dq_fragment_offset() to rows. A block handles one query
// tile of BLOCK_M rows, with the warp grid of the main kernel.
#include "block_info.cuh"
#include "bwd_warps_sm80.cuh"
#include "fp16x3.cuh"
#include "tile_order.cuh"

template <int HEAD_DIM, int BLOCK_M, int NUM_WARPS>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    flash_bwd_postprocess_fp16x3(const __grid_constant__ Fp16x3BwdParams params) {
  using GridQ = WarpGrid<BLOCK_M, HEAD_DIM, NUM_WARPS>;
  const FlashBwdParams& base = params.base;
  const AttentionShape& shape = base.shape;
  const Tile tile =
      tile_of_block(blockIdx.x, ceil_div(shape.seqlen_q, BLOCK_M), shape.heads_q, shape.batch, 1);
  const Sequence sequence = load_sequence(base, tile.batch);
  const int m_begin = tile.block * BLOCK_M;
  const int m_rows = min(BLOCK_M, sequence.seqlen_q - m_begin);
  const int head_kv = tile.head / (shape.heads_q / shape.heads_kv);
  const HeadRange& range = params.split.ranges[int64_t(tile.batch) * shape.heads_kv + head_kv];
  if (m_rows <= 0 || !fp16x3_serves(params.split, tile.batch, shape.heads_kv)) return;

  const float factor = shape.scale * power_of_two(-gradient_exponent(range, shape)) *
                       power_of_two(-scale_exponent(range, SplitTensor::K));
  const float* dq_accum =
      base.dq_accum + (tile.head * base.accum_rows + sequence.accum_start + m_begin) * HEAD_DIM;
  float acc[GridQ::M][GridQ::N][4];
#pragma unroll
  for (int m = 0; m < GridQ::M; ++m) {
#pragma unroll
    for (int n = 0; n < GridQ::N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = dq_accum[dq_fragment_offset<GridQ>(m, n, i)];
    }
  }
  float* dq = static_cast<float*>(base.dq) +
              base.dq_strides.at(tile.batch, sequence.start_q + m_begin, tile.head);
  store_gradient(dq, base.dq_strides.row, GridQ::row(), m_rows, GridQ::col(), shape.head_dim, acc,
                 factor);
}
