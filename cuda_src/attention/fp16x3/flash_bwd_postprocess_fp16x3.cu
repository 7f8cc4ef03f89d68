// Converts the accumulator of dQ after flash_bwd_fp16x3.cu: dQ = scale * dq_accum without the
// scales of dS and K, from the order of dq_fragment_offset() to rows. A block handles one query
// tile of BLOCK_M rows, with the warp grid of the main kernel.
#include "../dq_rows.cuh"
#include "../sm80/bwd_warps.cuh"
#include "parts.cuh"

template <int HEAD_DIM, int BLOCK_M, int NUM_WARPS>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    flash_bwd_postprocess_fp16x3(const __grid_constant__ Fp16x3BwdParams params) {
  using GridQ = WarpGrid<BLOCK_M, HEAD_DIM, NUM_WARPS>;
  const FlashBwdParams& base = params.base;
  const AttentionShape& shape = base.shape;
  const DqRows rows = dq_rows_of_block<HEAD_DIM, BLOCK_M>(base);
  const int head_kv = rows.head / (shape.heads_q / shape.heads_kv);
  const HeadRange& range = params.split.ranges[int64_t(rows.batch) * shape.heads_kv + head_kv];
  if (rows.count <= 0 || !fp16x3_serves(params.split, rows.batch, shape.heads_kv)) return;

  const float factor = shape.scale * power_of_two(-gradient_exponent(range, shape)) *
                       power_of_two(-scale_exponent(range, SplitTensor::K));
  float acc[GridQ::M][GridQ::N][4];
#pragma unroll
  for (int m = 0; m < GridQ::M; ++m) {
#pragma unroll
    for (int n = 0; n < GridQ::N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = rows.accum[dq_fragment_offset<GridQ>(m, n, i)];
    }
  }
  store_gradient(static_cast<float*>(base.dq) + rows.place, base.dq_strides.row, GridQ::row(),
                 rows.count, GridQ::col(), shape.head_dim, acc, factor);
}
