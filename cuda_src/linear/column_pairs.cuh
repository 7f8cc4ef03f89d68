// The pairs of columns of out of which one thread has both: neighbours, or the two numbers that a
// rotary embedding rotates; with a gate, the same column of both weights.
#pragma once
#include "epilogue.cuh"

struct ColumnPair {
  int first;
  int second;
};

__device__ __forceinline__ int num_pairs(const LinearParams& params, bool gated) {
  return gated ? params.columns : (params.columns + 1) / 2;
}

// The second column may lie outside of out where their number is odd.
template <bool GATED, bool ROTARY>
__device__ __forceinline__ ColumnPair column_pair(const LinearParams& params, int pair) {
  if constexpr (GATED) return {pair, pair};
  const ColumnPair neighbours = {2 * pair, 2 * pair + 1};
  if constexpr (ROTARY) {
    const Rotary& rotary = params.rotary;
    const int half = rotary.rotary_dim / 2, place = pair % (rotary.head_dim / 2);
    if (neighbours.first < rotary.columns && place < half && !rotary.interleaved) {
      const int first = neighbours.first - place;  // 2 * pair is the head's first column + 2 place
      return {first, first + half};
    }
  }
  return neighbours;
}

// The row of a weight that makes the first, or the second, column of a pair. A pair outside of out
// gets some row inside, and its results are not stored.
template <typename T, bool GATED, bool ROTARY>
__device__ __forceinline__ const T* weight_row(const LinearParams& params, int pair, bool second) {
  const ColumnPair columns = column_pair<GATED, ROTARY>(params, pair);
  const int64_t row = min(second ? columns.second : columns.first, params.columns - 1);
  if (GATED && second) return static_cast<const T*>(params.gate_weight) + row * params.gate_stride;
  return static_cast<const T*>(params.weight) + row * params.weight_stride;
}

// Computes the epilogue of the sums of a pair, in place: one number of out if GATED, else two.
template <typename T, Activation ACTIVATION, bool GATED, bool ROTARY>
__device__ __forceinline__ void finish_pair(const LinearParams& params, int64_t row,
                                            const RowRotation<T>& rotation, ColumnPair columns,
                                            float& first, float& second) {
  if (columns.first >= params.columns) return;
  first = activated<T, ACTIVATION, GATED>(params, columns.first, first, second);
  const bool both = !GATED && columns.second < params.columns;
  if (both) second = activated<T, ACTIVATION, false>(params, columns.second, second, 0.f);
  if (ROTARY && is_rotated(params.rotary, columns.first))
    rotation(rotary_pair(params.rotary, columns.first), first, second);
  first += residual_at<T>(params, row, columns.first);
  if (both) second += residual_at<T>(params, row, columns.second);
}

template <typename T, bool GATED>
__device__ __forceinline__ void store_pair(const LinearParams& params, int64_t row,
                                           ColumnPair columns, float first, float second) {
  T* out = static_cast<T*>(params.out) + row * params.out_stride;
  if (columns.first < params.columns) out[columns.first] = from_float<T>(first);
  if (!GATED && columns.second < params.columns) out[columns.second] = from_float<T>(second);
}
