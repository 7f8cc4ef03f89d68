// From raw products to scores on an accumulator fragment of 16 rows (see ptx/mma.cuh):
// softcap, ALiBi and the mask. wgmma accumulators have the same layout, warp by warp.
#pragma once
#include "../ptx/math.cuh"
#include "block_info.cuh"

// What turns s = q.k into the exponent of 2: exponent = scale_log2 * s', where s' is s, or with a
// softcap tanh(s * to_tanh), plus the ALiBi term in the same units. scale_log2 is positive, so the
// maximum of s' is the maximum of the scores.
template <bool SOFTCAP>
struct ScoreScale {
  float scale_log2;
  float to_tanh;

  __device__ explicit ScoreScale(const AttentionShape& shape)
      : scale_log2((SOFTCAP ? shape.softcap : shape.scale) * LOG2E),
        to_tanh(SOFTCAP ? shape.scale * rcp_approx(shape.softcap) : 0.f) {}

  // An ALiBi slope in the units of s'; with 1, what a bias is multiplied with.
  __device__ float alibi(float slope) const { return slope * LOG2E * rcp_approx(scale_log2); }
};

template <int N>
__device__ __forceinline__ void apply_softcap(float (&acc)[N][4], float to_tanh) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] = tanh_exp2(acc[n][i] * to_tanh);
  }
}

// Subtracts slope * |row + diagonal - col|. row and col are those of acc[0][0] in this lane.
template <int N>
__device__ __forceinline__ void apply_alibi(float (&acc)[N][4], float slope, int row, int col,
                                            int diagonal) {
  const float distance = float(row + diagonal - col);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      acc[n][i] -= slope * fabsf(distance + float(i / 2 * 8 - n * 8 - i % 2));
    }
  }
}

// -inf where the query does not see the key.
template <int N>
__device__ __forceinline__ void apply_mask(float (&acc)[N][4], const Sequence& sequence, int row,
                                           int col) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // begin <= key < end in one unsigned comparison; an empty range may have end < begin.
    const int begin = sequence.key_begin(row + half * 8);
    const uint32_t length = max(0, sequence.key_end(row + half * 8) - begin);
    const uint32_t first = col - begin;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (first + n * 8 + i >= length) acc[n][half * 2 + i] = -INF;
      }
    }
  }
}
