// Sums over groups of threads, of any small struct of floats that has an operator +. Every thread
// gets the same bits, in every run: the order of the additions is fixed, and + must be commutative.
#pragma once
#include "../ptx/math.cuh"

constexpr int MAX_WARPS = 32;

// Two sums that are taken together.
struct Sums {
  float first;
  float second;
};

__device__ __forceinline__ Sums operator+(Sums a, Sums b) {
  return {a.first + b.first, a.second + b.second};
}

// The number of some values, their mean, and m2, the sum of the squares of their deviations from
// it. Merging these avoids the cancellation of E[x^2] - E[x]^2.
// Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances.
struct Moments {
  float count;
  float mean;
  float m2;
};

__device__ __forceinline__ Moments operator+(Moments a, Moments b) {
  const float count = a.count + b.count;
  const float share = count > 0.f ? rcp_approx(count) : 0.f;
  const float delta = b.mean - a.mean;
  // This form is commutative, and the weights of the two means add up to 1 however `share` is
  // rounded. An error of their sum would be multiplied by the mean, which may be large.
  const float mean = 0.5f * (a.mean + b.mean) + 0.5f * delta * ((b.count - a.count) * share);
  return {count, mean, a.m2 + b.m2 + delta * delta * (a.count * (b.count * share))};
}

// The moments of `count` values whose mean is only approximately `mean`. `rest` holds the sums of
// the deviations from that approximation and of their squares; `share` is 1 / count.
__device__ __forceinline__ Moments moments_of(float count, float share, float mean, Sums rest) {
  const float error = rest.first * share;
  return {count, mean + error, rest.second - rest.first * error};
}

template <class V>
__device__ __forceinline__ V shuffle_xor(V value, int mask) {
  constexpr int FLOATS = sizeof(V) / sizeof(float);
  V result;
#pragma unroll
  for (int i = 0; i < FLOATS; ++i) {
    reinterpret_cast<float*>(&result)[i] =
        __shfl_xor_sync(0xffffffffu, reinterpret_cast<const float*>(&value)[i], mask);
  }
  return result;
}

// The sum over LANES (a power of two) neighbouring lanes of a warp.
template <int LANES, class V>
__device__ __forceinline__ V sum_of_neighbours(V value) {
#pragma unroll
  for (int mask = 1; mask < LANES; mask *= 2) value = value + shuffle_xor(value, mask);
  return value;
}

// The sum over THREADS (a power of two) consecutive threads. If they are more than a warp, they
// must be the whole block, and the block must synchronise before `scratch` is used again.
template <int THREADS, class V>
__device__ __forceinline__ V group_sum(V value, V (&scratch)[MAX_WARPS]) {
  value = sum_of_neighbours<(THREADS < 32 ? THREADS : 32)>(value);
  if constexpr (THREADS > 32) {
    constexpr int WARPS = THREADS / 32;
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();  // the sums of all warps are written
    value = sum_of_neighbours<WARPS>(scratch[lane % WARPS]);
  }
  return value;
}
