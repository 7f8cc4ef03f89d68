// What the kernels of GroupNorm share: the formulas for one pack of one channel or of several.
#pragma once
#include "../common/activation.cuh"
#include "row_tile.cuh"

// How channels lie in a pack: one of them, two with half of it each, or one for each element.
enum Layout { first, halves, last };

template <Layout LAYOUT, int VECTOR>
__host__ __device__ constexpr int pack_channels() {
  return LAYOUT == first ? 1 : LAYOUT == halves ? 2 : VECTOR;
}

// Parameters of the channels of a pack: z = (x - mean) * scale + bias.
template <int CHANNELS>
struct Affine {
  float mean[CHANNELS];
  float scale[CHANNELS];  // 1 / deviation * weight
  float bias[CHANNELS];
};

// Of neighbouring channels of one group, beginning with `channel`.
template <int CHANNELS, typename WEIGHT>
__device__ __forceinline__ Affine<CHANNELS> affine_of(const WEIGHT* weight, const WEIGHT* bias,
                                                      float mean, float scale) {
  Affine<CHANNELS> result;
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) {
    result.mean[i] = mean;
    result.scale[i] = scale * to_float(weight[i]);
    result.bias[i] = to_float(bias[i]);
  }
  return result;
}

template <Activation ACTIVATION, typename T, int VECTOR, int CHANNELS>
__device__ __forceinline__ Words<T, VECTOR> activated(const Words<T, VECTOR>& x,
                                                      const Affine<CHANNELS>& affine) {
  constexpr int RUN = VECTOR / CHANNELS;
  float out[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const int c = i / RUN;
    out[i] = activate<ACTIVATION>((x.at(i) - affine.mean[c]) * affine.scale[c] + affine.bias[c]);
  }
  return round_words<T>(out);
}

// Adds dz * (x - mean) and dz to the sums of the channels, dz = dout * activation'(z) being the
// gradient before the activation. Returns dz, rounded.
template <Activation ACTIVATION, typename T, int VECTOR, int CHANNELS>
__device__ __forceinline__ Words<T, VECTOR> add_to_sums(const Words<T, VECTOR>& x,
                                                        const Words<T, VECTOR>& dout,
                                                        const Affine<CHANNELS>& affine,
                                                        Sums (&sums)[CHANNELS]) {
  constexpr int RUN = VECTOR / CHANNELS;
  float dz[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const int c = i / RUN;
    const float centred = x.at(i) - affine.mean[c];
    dz[i] = dout.at(i) * activation_slope<ACTIVATION>(centred * affine.scale[c] + affine.bias[c]);
    sums[c].first += dz[i] * centred;
    sums[c].second += dz[i];
  }
  return round_words<T>(dz);
}

// With n = (x - mean) / deviation, and the means over the group of weight * dz * n and weight * dz:
//   dx = (weight * dz - mean of weight * dz - n * mean of weight * dz * n) / deviation
// which is weight / deviation * dz + slope * (x - mean) + constant.
struct InputGradient {
  float slope;
  float constant;
};

__device__ __forceinline__ InputGradient input_gradient(float scale, Sums means) {
  return {-scale * scale * means.first, -scale * means.second};
}

// dx of a pack, dz computed again.
template <Activation ACTIVATION, typename T, int VECTOR, int CHANNELS>
__device__ __forceinline__ Words<T, VECTOR> gradient_of(
    const Words<T, VECTOR>& x, const Words<T, VECTOR>& dout, const Affine<CHANNELS>& affine,
    const InputGradient (&constants)[CHANNELS]) {
  constexpr int RUN = VECTOR / CHANNELS;
  float dx[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const int c = i / RUN;
    const float centred = x.at(i) - affine.mean[c];
    const float z = centred * affine.scale[c] + affine.bias[c];
    const float dz = dout.at(i) * activation_slope<ACTIVATION>(z);
    dx[i] = affine.scale[c] * dz + (constants[c].slope * centred + constants[c].constant);
  }
  return round_words<T>(dx);
}

// Adds up what `lanes` neighbouring threads have, a power of two up to 32.
__device__ __forceinline__ Sums sum_of_lanes(Sums sums, int lanes) {
  for (int mask = 1; mask < lanes; mask *= 2) sums = sums + shuffle_xor(sums, mask);
  return sums;
}

// The smallest power of two that is no less than n, up to 32.
__device__ __forceinline__ int lanes_for(int n) {
  return n > 16 ? 32 : n > 1 ? 1 << (32 - __clz(n - 1)) : 1;
}
