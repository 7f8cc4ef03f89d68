// The epilogue of a projection, on its sums in float32 registers before they are stored: bias,
// activation and gate, rotary embedding, residual; in this order.
#pragma once
#include "../common/activation.cuh"
#include "../common/convert.cuh"
#include "../ptx/ld_global.cuh"
#include "params.cuh"

// Element `index` of an array of T, or of float if `wide`.
template <typename T>
__device__ __forceinline__ float element(const void* data, int64_t index, bool wide = false) {
  return wide ? static_cast<const float*>(data)[index]
              : to_float(static_cast<const T*>(data)[index]);
}

// The sum of a column with its bias, activation and gate; `gate`, the sum of the gate, is read if
// GATED.
template <typename T, Activation ACTIVATION, bool GATED>
__device__ __forceinline__ float activated(const LinearParams& params, int column, float sum,
                                           float gate) {
  const void *bias = params.bias, *gate_bias = params.gate_bias;
  if (bias) sum += element<T>(bias, column);
  if constexpr (GATED) {
    if (gate_bias) gate += element<T>(gate_bias, column);
    return activate<ACTIVATION>(gate) * sum;
  } else {
    return activate<ACTIVATION>(sum);
  }
}

// The residual of an element of out; 0 without one.
template <typename T>
__device__ __forceinline__ float residual_at(const LinearParams& params, int64_t row, int column) {
  return params.residual ? element<T>(params.residual, row * params.residual_stride + column) : 0.f;
}

// The rotary embedding of one row: Su et al., RoFormer, arXiv:2104.09864.
template <typename T>
struct RowRotation {
  const LinearParams& params;
  int64_t angles;  // index in cos and sin of the first angle of its position

  // A position outside of the tables is taken as the nearest one inside.
  __device__ RowRotation(const LinearParams& params, int64_t row) : params(params) {
    const Rotary& rotary = params.rotary;
    int64_t position = row % rotary.seqlen;
    if (params.positions) {
      position = rotary.wide_positions ? static_cast<const int64_t*>(params.positions)[row]
                                       : static_cast<const int*>(params.positions)[row];
    }
    position = max(int64_t(0), min(position, rotary.num_positions - 1));
    angles = position * (rotary.rotary_dim / 2);
  }

  // cos and sin of pair `pair` (0 to rotary_dim / 2 - 1) of a head.
  __device__ float2 angle(int pair) const {
    return {element<T>(params.cos, angles + pair, params.rotary.wide),
            element<T>(params.sin, angles + pair, params.rotary.wide)};
  }
  __device__ static void rotate(float2 angle, float& first, float& second) {
    const float rotated = first * angle.x - second * angle.y;
    second = second * angle.x + first * angle.y;
    first = rotated;
  }
  __device__ void operator()(int pair, float& first, float& second) const {
    rotate(angle(pair), first, second);
  }

  // Prefetches the angles of a pair into the L2 cache.
  __device__ void prefetch(int pair) const {
    const int64_t byte = (angles + pair) * (params.rotary.wide ? sizeof(float) : sizeof(T));
    prefetch_l2(static_cast<const char*>(params.cos) + byte);
    prefetch_l2(static_cast<const char*>(params.sin) + byte);
  }
};

// Whether a column is rotated; then it belongs to pair rotary_pair(rotary, column).
__device__ __forceinline__ bool is_rotated(const Rotary& rotary, int column) {
  return column < rotary.columns && column % rotary.head_dim < rotary.rotary_dim;
}

__device__ __forceinline__ int rotary_pair(const Rotary& rotary, int column) {
  const int place = column % rotary.head_dim;
  return rotary.interleaved ? place / 2 : place % (rotary.rotary_dim / 2);
}
