// Gradients of group_norm_fwd, for groups that fit into the registers of a block. With
// n = (x - mean) * scale and dz = dout * activation'(n * weight + bias):
//   dweight = sum of dz * n over a channel, dbias = sum of dz
//   dx      = scale * (weight * dz - mean of weight * dz - n * mean of weight * dz * n)
//
// dout and x are read once. The sums of the channels of this sample are both the block's shares of
// dweight and dbias (sum_partials adds up the samples) and, times weight, the means in dx. They are
// added up pairwise in shared memory: with channels first a row of sums for each pack of a channel,
// with channels last a row of sums for each row of threads, which keep to their columns.
#include "../ptx/opaque.cuh"
#include "group_tile.cuh"

// Adds `count` rows of `width` values up into the first row; the block has synchronised before.
template <int NUM_THREADS>
__device__ __forceinline__ void sum_rows(float* values, int count, int width) {
  while (count > 1) {
    const int half = (count + 1) / 2;
    for (int i = threadIdx.x; i < (count - half) * width; i += NUM_THREADS)
      values[i] += values[i + half * width];
    __syncthreads();
    count = half;
  }
}

template <typename T, typename WEIGHT, Activation ACTIVATION, bool CHANNELS_LAST, int NUM_THREADS,
          int LOADS, int VECTOR>
__global__ void __launch_bounds__(NUM_THREADS, min_blocks(NUM_THREADS, 128))
    group_norm_bwd(const __grid_constant__ GroupNormBwdParams params) {
  const GroupNormShape& shape = params.shape;
  const int size = group_size(shape), channels = group_channels<CHANNELS_LAST>(shape);
  const int group = blockIdx.x % shape.groups;
  const int64_t batch = blockIdx.x / shape.groups;
  const T* x = static_cast<const T*>(params.x) + batch * params.x_strides.batch +
               group * params.x_strides.group;
  const T* dout = static_cast<const T*>(params.dout) + batch * params.dout_strides.batch +
                  group * params.dout_strides.group;
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight) + group * channels;
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias) + group * channels;
  const float mean = params.stats[2 * int64_t(blockIdx.x)];
  float scale = params.stats[2 * int64_t(blockIdx.x) + 1];

  // ---- read ----
  const int row_packs = shape.columns / VECTOR;
  const int active = CHANNELS_LAST ? NUM_THREADS / row_packs * row_packs : NUM_THREADS;
  const auto element = [&](int load) {
    return int(threadIdx.x) < active ? (load * active + int(threadIdx.x)) * VECTOR : size;
  };
  Pack<T, VECTOR> x_packs[LOADS], dout_packs[LOADS];
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    if (element(load) >= size) continue;
    const Position position = position_of(element(load), shape);
    x_packs[load] = load_pack<VECTOR>(x + offset(params.x_strides, position));
    dout_packs[load] = load_pack<VECTOR>(dout + offset(params.dout_strides, position));
  }

  // ---- sums of each pack (channels first) or of each column (channels last) ----
  constexpr int N = CHANNELS_LAST ? VECTOR : LOADS;
  float sums[2][N] = {};
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    if (element(load) >= size) continue;
    const Position position = position_of(element(load), shape);
    const auto weights = load_channels<CHANNELS_LAST, VECTOR>(weight, position);
    const auto biases = load_channels<CHANNELS_LAST, VECTOR>(bias, position);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const Element e = element_of<ACTIVATION>(to_float(x_packs[load].values[i]),
                                               to_float(dout_packs[load].values[i]), mean, scale,
                                               weights.values[i], biases.values[i]);
      sums[0][CHANNELS_LAST ? i : load] += e.dz * e.normal;
      sums[1][CHANNELS_LAST ? i : load] += e.dz;
    }
  }

  // ---- sums of each channel, and of the group ----
  __shared__ float shared[NUM_THREADS * N];
  float total[2] = {0.f, 0.f};
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    if constexpr (CHANNELS_LAST) {
      if (int(threadIdx.x) < active) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) shared[threadIdx.x * VECTOR + i] = sums[which][i];
      }
    } else {
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        if (element(load) >= size) continue;
        const Position position = position_of(element(load), shape);
        shared[position.column / VECTOR * channels + position.row] = sums[which][load];
      }
    }
    __syncthreads();
    sum_rows<NUM_THREADS>(shared, CHANNELS_LAST ? active / row_packs : row_packs, channels);
    float* partials = params.partials + (which * shape.batch + batch) * shape.groups * channels;
    for (int channel = threadIdx.x; channel < channels; channel += NUM_THREADS) {
      partials[group * channels + channel] = shared[channel];
      total[which] += to_float(weight[channel]) * shared[channel];
    }
    __syncthreads();
  }
  __shared__ Sums scratch[MAX_WARPS];
  Sums means = group_sum<NUM_THREADS>(Sums{total[0], total[1]}, scratch);
  means = {means.first * shape.inverse_size, means.second * shape.inverse_size};

  // ---- dx ----
  // Many values of a thread: cheaper computed again than kept.
  if constexpr (LOADS * VECTOR > 16) scale = opaque(scale);
  T* dx = static_cast<T*>(params.dx) + batch * params.dx_strides.batch +
          group * params.dx_strides.group;
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    if (element(load) >= size) continue;
    const Position position = position_of(element(load), shape);
    const auto weights = load_channels<CHANNELS_LAST, VECTOR>(weight, position);
    const auto biases = load_channels<CHANNELS_LAST, VECTOR>(bias, position);
    Pack<T, VECTOR> result;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const Element e = element_of<ACTIVATION>(to_float(x_packs[load].values[i]),
                                               to_float(dout_packs[load].values[i]), mean, scale,
                                               weights.values[i], biases.values[i]);
      result.values[i] = from_float<T>(input_gradient(e, weights.values[i], scale, means));
    }
    store_pack<VECTOR>(dx + offset(params.dx_strides, position), result);
  }
}
