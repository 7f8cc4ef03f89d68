// The end of a backward pass in which several blocks have shared the query heads of a key head: dK
// and dV are the sums of what each share has left in dkv_partial, always in the same order, so they
// are deterministic.
//
// A block has BLOCK_N rows of one key head, a warp one row after the other; a lane adds four
// columns of every 128. Nobody else writes these rows, and no block waits for another.
#include "../ptx/math.cuh"
#include "block_info.cuh"
#include "partial_gradient.cuh"
#include "tile_order.cuh"

template <typename T, int HEAD_DIM, int NUM_WARPS, int BLOCK_N>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    flash_bwd_combine(const __grid_constant__ FlashBwdParams params) {
  static_assert(HEAD_DIM % 4 == 0, "a lane has four columns");
  const AttentionShape& shape = params.shape;
  const Tile tile =
      tile_of_block(blockIdx.x, ceil_div(shape.seqlen_k, BLOCK_N), shape.heads_kv, shape.batch, 1);
  const Sequence sequence = load_sequence(params, tile.batch);
  const int end = min((tile.block + 1) * BLOCK_N, sequence.seqlen_k);
  const int64_t share_stride = params.rows_k * shape.heads_kv * HEAD_DIM;
  for (int row = tile.block * BLOCK_N + threadIdx.x / 32; row < end; row += NUM_WARPS) {
    const int64_t row_k = sequence.start_k + row;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const bool is_dk = which == static_cast<int>(KeyGradient::DK);
      const float* partial = partial_gradient<HEAD_DIM>(params, static_cast<KeyGradient>(which), 0,
                                                        tile.batch, row_k, tile.head);
      const Strides& strides = is_dk ? params.dk_strides : params.dv_strides;
      T* out =
          static_cast<T*>(is_dk ? params.dk : params.dv) + strides.at(tile.batch, row_k, tile.head);
      for (int column = threadIdx.x % 32 * 4; column < shape.head_dim; column += 128) {
        float4 sum = *reinterpret_cast<const float4*>(partial + column);
        for (int share = 1; share < shape.group_shares; ++share) {
          const float4 x =
              *reinterpret_cast<const float4*>(partial + share * share_stride + column);
          sum.x += x.x;
          sum.y += x.y;
          sum.z += x.z;
          sum.w += x.w;
        }
        // The form of Turing, which every architecture has; memory is the limit here.
        *reinterpret_cast<uint2*>(out + column) =
            make_uint2(pack<T, 75>(sum.x, sum.y), pack<T, 75>(sum.z, sum.w));
      }
    }
  }
}
