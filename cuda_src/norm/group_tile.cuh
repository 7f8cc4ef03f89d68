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

// Which packs of a contiguous group a thread has.
template <class Tile, Layout LAYOUT>
struct GroupPart {
  static constexpr int CHANNELS = pack_channels<LAYOUT, Tile::VECTOR>();  // of a pack
  int columns;                                                            // elements of the group

  __device__ explicit GroupPart(const GroupNormShape& shape)
      : columns(shape.channels * shape.positions) {}

  // The first channel of a load.
  __device__ int channel(const GroupNormShape& shape, int load) const {
    const int pack = opaque(int(threadIdx.x % Tile::ROW_THREADS)) + load * Tile::ROW_THREADS;
    return CHANNELS > 1 ? pack * CHANNELS : shape.packs.divide(pack);
  }
};

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

// The same for what an activation takes (ARGUMENT_SCALE). 16-bit types spare the subtraction of the
// mean: what x * scale and mean * scale lose to each other is nothing beside their own rounding.
template <Activation ACTIVATION, typename T, int CHANNELS>
struct Argument {
  static constexpr bool CENTRED = sizeof(T) == 4;
  float mean[CHANNELS];
  float scale[CHANNELS];
  float bias[CHANNELS];

  __device__ __forceinline__ explicit Argument(const Affine<CHANNELS>& affine) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      mean[c] = CENTRED ? affine.mean[c] : 0.f;
      scale[c] = ARGUMENT_SCALE<ACTIVATION> * affine.scale[c];
      bias[c] = ARGUMENT_SCALE<ACTIVATION> * affine.bias[c];
      if (!CENTRED) bias[c] -= affine.mean[c] * scale[c];
    }
  }

  // Of an element of channel c.
  __device__ __forceinline__ float of(float x, int c) const {
    return (x - mean[c]) * scale[c] + bias[c];
  }
};

template <Activation ACTIVATION, typename T, int VECTOR, int CHANNELS>
__device__ __forceinline__ Words<T, VECTOR> activated(const Words<T, VECTOR>& x,
                                                      const Affine<CHANNELS>& affine) {
  constexpr int RUN = VECTOR / CHANNELS;
  const Argument<ACTIVATION, T, CHANNELS> argument(affine);
  float out[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const int c = i / RUN;
    out[i] = activate_scaled<ACTIVATION>(argument.of(x.at(i), c));
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
  const Argument<ACTIVATION, T, CHANNELS> argument(affine);
  float dz[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const int c = i / RUN;
    const float u = argument.of(x.at(i), c);
    dz[i] = dout.at(i) * slope_scaled<ACTIVATION>(u);
    sums[c].first += dz[i] * (x.at(i) - affine.mean[c]);
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

// dz of a pack and what it adds to the sums, for kernels that keep weights and biases times
// ARGUMENT_SCALE; `scales` are such weights / deviation.
template <Activation ACTIVATION, typename T, int VECTOR, int CHANNELS>
struct PackGradient {
  static constexpr bool CENTRED = sizeof(T) == 4;  // as in Argument
  float deviations[VECTOR];                        // x - mean, or x unless CENTRED
  float dz[VECTOR];
  Sums sums[CHANNELS];  // of dz * (x - mean), dz

  __device__ PackGradient(const Words<T, VECTOR>& x, const Words<T, VECTOR>& dout, float mean,
                          const float (&scales)[CHANNELS], const float (&biases)[CHANNELS])
      : sums{} {
    const float centre = CENTRED ? mean : 0.f, shift = CENTRED ? 0.f : mean;
    float offsets[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) offsets[c] = biases[c] - shift * scales[c];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const int c = i / (VECTOR / CHANNELS);
      deviations[i] = x.at(i) - centre;
      dz[i] = dout.at(i) * slope_scaled<ACTIVATION>(deviations[i] * scales[c] + offsets[c]);
      sums[c].first += dz[i] * deviations[i];
      sums[c].second += dz[i];
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) sums[c].first -= shift * sums[c].second;
  }

  // For `deviations`; `total` are the sums over the group of scales * sums.
  __device__ static InputGradient input_gradient(float mean, float scale, float inverse_size,
                                                 Sums total) {
    const float inverse = -1.f / ARGUMENT_SCALE<ACTIVATION> * inverse_size;
    const float slope = scale * scale * inverse * total.first;
    return {slope, inverse * total.second - (CENTRED ? 0.f : mean) * slope};
  }

  // `scale` as in `scales`.
  __device__ static float dx(float deviation, float dz, float scale, InputGradient constants) {
    return 1.f / ARGUMENT_SCALE<ACTIVATION> * scale * dz +
           (constants.slope * deviation + constants.constant);
  }
};

// dx of a pack. `dz_of(i)` is dz of element i.
template <typename T, int VECTOR, int CHANNELS, class Dz>
__device__ __forceinline__ Words<T, VECTOR> dx_of(const Words<T, VECTOR>& x,
                                                  const Affine<CHANNELS>& affine,
                                                  const InputGradient (&constants)[CHANNELS],
                                                  Dz dz_of) {
  constexpr int RUN = VECTOR / CHANNELS;
  float dx[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const int c = i / RUN;
    const float rest = constants[c].constant - constants[c].slope * affine.mean[c];
    dx[i] = affine.scale[c] * dz_of(i) + (constants[c].slope * x.at(i) + rest);
  }
  return round_words<T>(dx);
}

// dx of a pack, dz computed again.
template <Activation ACTIVATION, typename T, int VECTOR, int CHANNELS>
__device__ __forceinline__ Words<T, VECTOR> gradient_of(
    const Words<T, VECTOR>& x, const Words<T, VECTOR>& dout, const Affine<CHANNELS>& affine,
    const InputGradient (&constants)[CHANNELS]) {
  const Argument<ACTIVATION, T, CHANNELS> argument(affine);
  return dx_of(x, affine, constants, [&](int i) {
    const int c = i / (VECTOR / CHANNELS);
    const float u = argument.of(x.at(i), c);
    return dout.at(i) * slope_scaled<ACTIVATION>(u);
  });
}

// Adds up what `lanes` neighbouring threads have, a power of two up to 32.
__device__ __forceinline__ Sums sum_of_lanes(Sums sums, int lanes) {
  for (int mask = 1; mask < lanes; mask *= 2) sums = sums + shuffle_xor(sums, mask);
  return sums;
}

// The moments of all that each(add) hands to add(count, {mean, squares of the deviations from it})
// in `lanes` neighbouring threads. Two steps: the mean of the means, and deviations from that.
template <class Each>
__device__ __forceinline__ Moments moments_of_parts(Each each, int lanes) {
  Sums total = {0.f, 0.f};
  each([&](float n, Sums part) { total = total + Sums{n, n * part.first}; });
  total = sum_of_lanes(total, lanes);
  const float inverse = rcp_approx(max(total.first, 1.f));
  const float mean = total.second * inverse;
  Sums rest = {0.f, 0.f};
  each([&](float n, Sums part) {
    const float deviation = part.first - mean;
    rest = rest + Sums{n * deviation, part.second + n * deviation * deviation};
  });
  rest = sum_of_lanes(rest, lanes);
  return moments_of(total.first, inverse, mean, rest);
}

// The smallest power of two that is no less than n, up to 32.
__device__ __forceinline__ int lanes_for(int n) {
  return n > 16 ? 32 : n > 1 ? 1 << (32 - __clz(n - 1)) : 1;
}
