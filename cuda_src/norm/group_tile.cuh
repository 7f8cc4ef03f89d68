// One group of one sample, a matrix of rows with contiguous columns: with channels first, a row is
// a channel; with channels last, a column is one. A pack never crosses the end of a row.
#pragma once
#include "../common/activation.cuh"
#include "row_tile.cuh"

struct Position {
  int row;
  int column;
};

// Element `element` of a group, counted row by row.
__device__ __forceinline__ Position position_of(int element, const GroupNormShape& shape) {
  const int row = unsigned(element) / unsigned(shape.columns);
  return {row, element - row * shape.columns};
}

__device__ __forceinline__ int64_t offset(const GroupStrides& strides, Position position) {
  return position.row * strides.row + position.column;
}

__device__ __forceinline__ int group_size(const GroupNormShape& shape) {
  return shape.rows * shape.columns;
}

template <bool CHANNELS_LAST>
__device__ __forceinline__ int group_channels(const GroupNormShape& shape) {
  return CHANNELS_LAST ? shape.columns : shape.rows;
}

// The parameters of VECTOR neighbouring elements; `data` is the first channel of the group.
template <bool CHANNELS_LAST, int VECTOR, typename WEIGHT>
__device__ __forceinline__ Pack<float, VECTOR> load_channels(const WEIGHT* data,
                                                             Position position) {
  Pack<float, VECTOR> result;
  if constexpr (CHANNELS_LAST) {
    const auto pack = load_pack<VECTOR>(data + position.column);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) result.values[i] = to_float(pack.values[i]);
  } else {
    const float value = to_float(data[position.row]);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) result.values[i] = value;
  }
  return result;
}

// activation(x * scale * weight + ...) of one pack.
template <Activation ACTIVATION, int VECTOR, typename T>
__device__ __forceinline__ Pack<T, VECTOR> activated(const Pack<T, VECTOR>& x, float mean,
                                                     float scale, const Pack<float, VECTOR>& weight,
                                                     const Pack<float, VECTOR>& bias) {
  Pack<T, VECTOR> result;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const float normal = (to_float(x.values[i]) - mean) * scale;
    result.values[i] =
        from_float<T>(activate<ACTIVATION>(normal * weight.values[i] + bias.values[i]));
  }
  return result;
}

// What the backward needs of an element: the normalised input and the gradient before the
// activation.
struct Element {
  float normal;
  float dz;
};

template <Activation ACTIVATION>
__device__ __forceinline__ Element element_of(float x, float dout, float mean, float scale,
                                              float weight, float bias) {
  const float normal = (x - mean) * scale;
  return {normal, dout * activation_slope<ACTIVATION>(normal * weight + bias)};
}

// scale * (weight * dz - mean of weight * dz - normal * mean of weight * dz * normal)
__device__ __forceinline__ float input_gradient(Element element, float weight, float scale,
                                                Sums means) {
  return scale * (weight * element.dz - means.second - element.normal * means.first);
}
