// Gradients of group_norm_fwd, for groups that fit into registers, channels first. With
// n = (x - mean) * scale and dz = dout * activation'(n * weight + bias):
//   dweight = sum of dz * n over a channel, dbias = sum of dz
//   dx      = scale * (weight * dz - mean of weight * dz - n * mean of weight * dz * n)
//
// dout and x are read once; dz takes the place of dout, rounded, as separate operations would have
// it. The sums of the channels of this sample are both its shares of dweight and dbias
// (sum_partials adds up the samples) and, times weight, the means in dx. Those of a pack with one
// channel are added up in shared memory.
#include "group_tile.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, Layout LAYOUT, int ROW_THREADS,
          int LOADS, int VECTOR, int BLOCKS>
__global__ void __launch_bounds__(block_threads(ROW_THREADS), BLOCKS)
    group_norm_bwd(const __grid_constant__ GroupNormBwdParams params) {
  // ---- which group ----
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR>;
  constexpr int CHANNELS = pack_channels<LAYOUT, VECTOR>();
  const GroupNormShape& shape = params.shape;
  const int index = int(blockIdx.x) * Tile::ROWS + Tile::row(), batch = index / shape.groups;
  const int first_channel = (index - batch * shape.groups) * shape.channels;
  const int size = batch < shape.batch ? shape.channels * shape.positions : 0;
  const auto channel_of = [&](int element) {
    return CHANNELS > 1 ? element / VECTOR * CHANNELS : shape.packs.divide(element / VECTOR);
  };

  // ---- read ----
  const T* x = static_cast<const T*>(params.x) + batch * params.x_strides.batch +
               first_channel * params.x_strides.channel;
  const T* dout = static_cast<const T*>(params.dout) + batch * params.dout_strides.batch +
                  first_channel * params.dout_strides.channel;
  RowPacks<Tile, T> values, gradients;
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int element = Tile::column(load), channel = channel_of(element);
    if (element >= size) continue;
    const int64_t x_gap = params.x_strides.channel - shape.positions;  // between channels
    const int64_t dout_gap = params.dout_strides.channel - shape.positions;
    values.packs[load] = load_words<VECTOR, true>(x + element + channel * x_gap);
    gradients.packs[load] = load_words<VECTOR, true>(dout + element + channel * dout_gap);
  }
  const float mean = size ? params.stats[2 * int64_t(index)] : 0.f;
  const float scale = size ? params.stats[2 * int64_t(index) + 1] : 0.f;

  // ---- dz, sums of each pack ----
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight) + first_channel;
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias) + first_channel;
  float* partials =
      params.partials + batch * int64_t(shape.groups) * shape.channels + first_channel;
  const int64_t of_bias = shape.batch * shape.groups * shape.channels;
  Sums means = {0.f, 0.f};
  const auto add_channel = [&](int channel, Sums sums) {
    sums.first *= scale;
    partials[channel] = sums.first;
    partials[of_bias + channel] = sums.second;
    const float w = to_float(weight[channel]);
    means = means + Sums{w * sums.first, w * sums.second};
  };
  __shared__ Sums shared[CHANNELS > 1 ? 1 : Tile::ROWS * ROW_THREADS * LOADS];
  Sums* of_packs = shared + Tile::row() * (ROW_THREADS * LOADS);
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int element = opaque(Tile::column(load)), channel = channel_of(element);
    if (element >= size) continue;
    const auto affine = affine_of<CHANNELS>(weight + channel, bias + channel, mean, scale);
    Sums sums[CHANNELS] = {};
    gradients.packs[load] =
        add_to_sums<ACTIVATION>(values.packs[load], gradients.packs[load], affine, sums);
    if constexpr (CHANNELS > 1) {
#pragma unroll
      for (int i = 0; i < CHANNELS; ++i) add_channel(channel + i, sums[i]);
    } else {
      of_packs[element / VECTOR] = sums[0];
    }
  }

  // ---- sums of each channel, means of the group ----
  if constexpr (CHANNELS == 1) {
    __syncthreads();
    const int row_packs = shape.positions / VECTOR, thread = threadIdx.x % ROW_THREADS;
    const int lanes = min(lanes_for(row_packs), min(ROW_THREADS, 32));
    for (int begin = 0; begin < shape.channels; begin += ROW_THREADS / lanes) {
      const int channel = begin + thread / lanes;
      const bool inside = channel < shape.channels && size;
      Sums sums = {0.f, 0.f};
      for (int i = thread % lanes; i < row_packs && inside; i += lanes)
        sums = sums + of_packs[channel * row_packs + i];
      sums = sum_of_lanes(sums, lanes);
      if (inside && thread % lanes == 0) add_channel(channel, sums);
    }
  }
  __shared__ Sums scratch[MAX_WARPS];
  means = group_sum<ROW_THREADS>(means, scratch);
  means = {means.first * shape.inverse_size, means.second * shape.inverse_size};

  // ---- dx ----
  const InputGradient constants = input_gradient(scale, means);
  T* dx = static_cast<T*>(params.dx) + batch * params.dx_strides.batch +
          first_channel * params.dx_strides.channel;
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int element = opaque(Tile::column(load)), channel = channel_of(element);
    if (element >= size) continue;
    float result[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float factor = scale * to_float(weight[channel + i / (VECTOR / CHANNELS)]);
      result[i] = factor * gradients.at(load, i) +
                  (constants.slope * (values.at(load, i) - mean) + constants.constant);
    }
    const int64_t gap = params.dx_strides.channel - shape.positions;
    store_words<VECTOR>(dx + element + channel * gap, round_words<T>(result));
  }
}
