// The end of a backward pass in which several blocks divide the query heads of
// a key head: dK and dV are the sums of what these blocks have left in
// dkv_partial (float32), one share after the other. The order is always the
// same, so the sums are deterministic.
//
// A block handles BLOCK_N rows of one key head, and a thread four columns of a
// row at a time. Each row is written by one block, and no block waits for
// another.
#include "../ptx/math.cuh"
#include "block_info.cuh"
#include "partial_gradient.cuh"
#include "tile_order.cuh"

// Sums the shares of dK or of dV in `rows` rows from `row` on. `partial` is the
// first of them in the first share, `out` the first in the result.
template <typename T, int HEAD_DIM, int NUM_THREADS>
__device__ __forceinline__ void sum_shares(const FlashBwdParams& params, const float* partial,
                                           T* out, int64_t out_stride, int rows) {
  constexpr int QUADS = HEAD_DIM / 4;
  const AttentionShape& shape = params.shape;
  const int64_t share_stride = params.rows_k * shape.heads_kv * HEAD_DIM;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * QUADS; i += NUM_THREADS) {
    const int row = i / QUADS;
    const int column = i % QUADS * 4;
    if (column >= shape.head_dim) continue;
    const float* share = partial + int64_t(row) * shape.heads_kv * HEAD_DIM + column;
    float4 sum = {};
#pragma unroll 2
    for (int n = 0; n < shape.group_shares; ++n, share += share_stride) {
      const float4 x = *reinterpret_cast<const float4*>(share);
      sum.x += x.x;
      sum.y += x.y;
      sum.z += x.z;
      sum.w += x.w;
    }
    // The form of Turing, which every architecture has; memory is the limit
    // here.
    *reinterpret_cast<uint2*>(out + row * out_stride + column) =
        make_uint2(pack<T, 75>(sum.x, sum.y), pack<T, 75>(sum.z, sum.w));
  }
}

template <typename T, int HEAD_DIM, int NUM_WARPS, int BLOCK_N>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    flash_bwd_combine(const __grid_constant__ FlashBwdParams params) {
  const AttentionShape& shape = params.shape;
  const Tile tile =
      tile_of_block(blockIdx.x, ceil_div(shape.seqlen_k, BLOCK_N), shape.heads_kv, shape.batch, 1);
  const Sequence sequence = load_sequence(params, tile.batch);
  const int rows = min(BLOCK_N, sequence.seqlen_k - tile.block * BLOCK_N);
  const int64_t row = sequence.start_k + tile.block * BLOCK_N;
  const auto partial = [&](KeyGradient which) {
    return partial_gradient<HEAD_DIM>(params, which, 0, tile.batch, row, tile.head);
  };
  sum_shares<T, HEAD_DIM, NUM_WARPS * 32>(
      params, partial(KeyGradient::DK),
      static_cast<T*>(params.dk) + params.dk_strides.at(tile.batch, row, tile.head),
      params.dk_strides.row, rows);
  sum_shares<T, HEAD_DIM, NUM_WARPS * 32>(
      params, partial(KeyGradient::DV),
      static_cast<T*>(params.dv) + params.dv_strides.at(tile.batch, row, tile.head),
      params.dv_strides.row, rows);
}
