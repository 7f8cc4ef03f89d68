// The formulas of GroupNorm for one pack, whose elements are of CHANNELS channels, equally many of
// each. With n = (x - mean) / deviation, z = weight * n + bias and dz = dout * activation'(z):
//   out     = activation(z)
//   dweight = sum of dz * n over a channel, dbias = sum of dz
//   dx      = (weight * dz - mean of weight * dz - n * mean of weight * dz * n) / deviation,
// means over the group.
#pragma once
#include "../common/activation.cuh"
#include "statistics.cuh"

// z for each channel of a pack, times ARGUMENT_SCALE: (x - centre) * scale + offset. 16-bit types
// spare the subtraction of the mean: what x * scale and mean * scale lose to each other is nothing
// beside their own rounding.
template <Activation ACTIVATION, typename T, int CHANNELS>
struct Affine {
  static constexpr bool CENTRED = sizeof(T) == 4;
  static constexpr float ARGUMENT = ARGUMENT_SCALE<ACTIVATION>;
  static constexpr float INVERSE_ARGUMENT = 1.f / ARGUMENT;
  float centre[CHANNELS];
  float scale[CHANNELS];
  float offset[CHANNELS];

  __device__ static float centre_of(float mean) { return CENTRED ? mean : 0.f; }

  // `weight` and `bias` are already times ARGUMENT.
  __device__ __forceinline__ void set_scaled(int c, float mean, float inverse, float weight,
                                             float bias) {
    centre[c] = centre_of(mean);
    scale[c] = inverse * weight;
    offset[c] = CENTRED ? bias : bias - mean * scale[c];
  }

  __device__ __forceinline__ void set(int c, float mean, float inverse, float weight, float bias) {
    set_scaled(c, mean, inverse, ARGUMENT * weight, ARGUMENT * bias);
  }

  __device__ __forceinline__ float argument(float x, int c) const {
    return (x - centre[c]) * scale[c] + offset[c];
  }
};

// Returns the affine map of neighbouring channels of one group, from `channel` on.
template <Activation ACTIVATION, typename T, int CHANNELS, typename WEIGHT>
__device__ __forceinline__ Affine<ACTIVATION, T, CHANNELS> affine_of(const void* weight,
                                                                     const void* bias, int channel,
                                                                     float mean, float inverse) {
  Affine<ACTIVATION, T, CHANNELS> affine;
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c)
    affine.set(c, mean, inverse, to_float(static_cast<const WEIGHT*>(weight)[channel + c]),
               to_float(static_cast<const WEIGHT*>(bias)[channel + c]));
  return affine;
}

// `x` are Ts, or floats that were.
template <Activation ACTIVATION, typename T, typename V, int VECTOR, int CHANNELS>
__device__ __forceinline__ Words<T, VECTOR> activated(
    const Words<V, VECTOR>& x, const Affine<ACTIVATION, T, CHANNELS>& affine) {
  float out[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i)
    out[i] = activate_scaled<ACTIVATION>(affine.argument(x.at(i), i / (VECTOR / CHANNELS)));
  return round_words<T>(out);
}

// dz of a pack. Adds dz * (x - centre) and dz to the sums of its channels.
template <Activation ACTIVATION, typename T, int VECTOR, int CHANNELS>
__device__ __forceinline__ void add_gradients(const Words<T, VECTOR>& x,
                                              const Words<T, VECTOR>& dout,
                                              const Affine<ACTIVATION, T, CHANNELS>& affine,
                                              float (&dz)[VECTOR], Sums (&sums)[CHANNELS]) {
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const int c = i / (VECTOR / CHANNELS);
    dz[i] = dout.at(i) * slope_scaled<ACTIVATION>(affine.argument(x.at(i), c));
    sums[c].first += dz[i] * (x.at(i) - affine.centre[c]);
    sums[c].second += dz[i];
  }
}

// Turns such sums into those of dz * n and dz.
template <bool CENTRED>
__device__ __forceinline__ Sums channel_sums(Sums sums, float mean, float inverse) {
  if (!CENTRED) sums.first -= mean * sums.second;
  return {inverse * sums.first, sums.second};
}

// dx = scale / ARGUMENT * dz + slope * (x - centre) + constant.
struct InputGradient {
  float slope;
  float constant;

  // `means` are those of weight * dz * n / deviation and weight * dz / deviation over the group.
  template <bool CENTRED>
  __device__ __forceinline__ static InputGradient of(float mean, float inverse, Sums means) {
    const float slope = -inverse * means.first;
    return {slope, -means.second - (CENTRED ? 0.f : mean * slope)};
  }

  template <Activation ACTIVATION, typename T, int CHANNELS>
  __device__ __forceinline__ float dx(float x, float dz, int c,
                                      const Affine<ACTIVATION, T, CHANNELS>& affine) const {
    return affine.INVERSE_ARGUMENT * affine.scale[c] * dz +
           (slope * (x - affine.centre[c]) + constant);
  }
};

// The first channel of a pack of a contiguous group.
template <int CHANNELS>
__device__ __forceinline__ int channel_of_pack(const GroupNormShape& shape, int pack) {
  return CHANNELS > 1 ? pack * CHANNELS : shape.packs.divide(pack);
}
