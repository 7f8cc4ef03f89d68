// The sm_90 forward kernel stores the LSE of its rows here, and in a split the partial results that
// flash_fwd_combine_sm90.cu merges.
#pragma once
#include "fwd_block.cuh"

__device__ __forceinline__ float sink_of(const FlashFwdSm90Params& params,
                                         const EveryFwdTile& tile) {
  return params.base.sinks ? params.base.sinks[tile.head] : -INF;
}

// Stores the LSE of the two rows of a lane. `row` is the first one of the warp in the tile.
__device__ __forceinline__ void store_lse(const FlashFwdSm90Params& params,
                                          const EveryFwdTile& tile, int row, int lane,
                                          const float (&lse)[2]) {
  float* out = params.base.lse;
  if (!out || lane % 4 != 0) return;
  out += tile.lse_row(params.base);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + lane / 4 + half * 8;
    if (own < tile.m_rows) out[own] = lse[half];
  }
}

// Stores the output of a split in float32: 16 rows of a warp, from `row` of the tile on.
template <int N>
__device__ __forceinline__ void store_partial_rows(const FlashFwdSm90Params& params,
                                                   const EveryFwdTile& tile, int row,
                                                   const float (&acc)[N][4]) {
  const int lane = threadIdx.x % 32;
  float* out =
      params.partial_out +
      (tile.split * params.partial_rows + tile.lse_row(params.base) + row + lane / 4) * (N * 8) +
      lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + lane / 4 + half * 8 >= tile.m_rows) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      *reinterpret_cast<float2*>(out + half * 8 * N * 8 + n * 8) =
          make_float2(acc[n][2 * half], acc[n][2 * half + 1]);
    }
  }
}

// Stores the maximum and the sum (RowState::partial) of the two rows of a lane in a split.
__device__ __forceinline__ void store_partial_sums(const FlashFwdSm90Params& params,
                                                   const EveryFwdTile& tile, int row,
                                                   const float2 (&sums)[2]) {
  const int lane = threadIdx.x % 32;
  if (lane % 4 != 0) return;
  float2* out = params.partial_sums + tile.split * params.partial_rows + tile.lse_row(params.base);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + lane / 4 + half * 8;
    if (own < tile.m_rows) out[own] = sums[half];
  }
}
