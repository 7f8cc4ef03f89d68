// Converts the accumulator of dQ after the sm_90 backward kernels: dQ = scale * dq_accum, from
// float32 in the order of dq_fragment_offset() to rows of 16-bit values. A block handles 64 rows of
// one head, a warpgroup 64 columns of them. Nothing is shared between threads, and the time is that
// of memory.
#include "../dq_rows.cuh"
#include "../store_rows.cuh"
#include "bwd_block.cuh"

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(ceil_div(HEAD_DIM, 64) * WARPGROUP)
    flash_bwd_postprocess_sm90(const __grid_constant__ FlashBwdParams params) {
  const AttentionShape& shape = params.shape;
  const DqRows rows = dq_rows_of_block<HEAD_DIM, 64>(params);
  if (rows.count <= 0) return;

  const int column = threadIdx.x / WARPGROUP * 64;
  float acc[8][4];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float4 x = {};
    if (column + n * 8 < HEAD_DIM) {
      x = *reinterpret_cast<const float4*>(rows.accum + dq_fragment_offset(column / 8 + n));
    }
    acc[n][0] = shape.scale * x.x;
    acc[n][1] = shape.scale * x.y;
    acc[n][2] = shape.scale * x.z;
    acc[n][3] = shape.scale * x.w;
  }

  const int row = threadIdx.x % WARPGROUP / 32 * 16;  // first of the warp's 16
  const int64_t stride = params.dq_strides.row;
  store_rows(static_cast<T*>(params.dq) + rows.place + row * stride + column, stride, acc,
             rows.count - row, shape.head_dim - column);
}
