// Mean and variance of groups from the threads' sums.
#pragma once
#include "../norm/row_tile.cuh"
#include "params.cuh"

// Adds up what `lanes` neighbouring threads have, a power of two up to 32.
__device__ __forceinline__ Sums sum_of_lanes(Sums sums, int lanes) {
  for (int mask = 1; mask < lanes; mask *= 2) sums = sums + shuffle_xor(sums, mask);
  return sums;
}

// The smallest power of two that is no less than n, up to 32.
__device__ __forceinline__ int lanes_for(int n) {
  return n > 16 ? 32 : n > 1 ? 1 << (32 - __clz(n - 1)) : 1;
}

// 1 / deviation.
__device__ __forceinline__ float inverse_deviation(const Moments& moments,
                                                   const GroupNormShape& shape) {
  return rsqrtf(moments.m2 * shape.inverse_size + shape.eps);
}

// Computes the moments of a row of a warp or less in two passes over its values, and leaves them as
// floats.
template <class Tile, typename T>
__device__ __forceinline__ Moments moments_of_short_row(const RowPacks<Tile, T>& packs,
                                                        RowPacks<Tile, float>& values, int columns,
                                                        float inverse_size) {
#pragma unroll
  for (int load = 0; load < Tile::LOADS; ++load) {
    float wide[Tile::VECTOR];
#pragma unroll
    for (int i = 0; i < Tile::VECTOR; ++i) wide[i] = packs.at(load, i);
    values.packs[load] = round_words<float>(wide);
  }
  const float mean = inverse_size * sum_of_neighbours<Tile::ROW_THREADS>(values.sum(columns));
  const float squares = values.deviations(columns, mean).second;
  return {float(columns), mean, sum_of_neighbours<Tile::ROW_THREADS>(squares)};
}

// Sums of each channel of a thread: of the deviations from its origin, a value of it or of one
// near, and of their squares.
template <int CHANNELS>
struct DeviationSums {
  float origins[CHANNELS];
  Sums sums[CHANNELS] = {};

  template <typename T, int VECTOR>
  __device__ __forceinline__ void add(const Words<T, VECTOR>& values) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const int c = i / (VECTOR / CHANNELS);
      const float deviation = values.at(i) - origins[c];
      sums[c].first += deviation;
      sums[c].second += deviation * deviation;
    }
  }

  // Computes the moments of `count` values.
  __device__ Moments moments(int c, float count) const {
    return moments_of(count, rcp_approx(count), origins[c], sums[c]);
  }
};

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
