// dx of groups that do not fit into the registers of a block, after group_norm_bwd_sums.
#include "group_tile.cuh"

constexpr int THREADS = 256;
constexpr int LOADS = 2;

template <typename T, typename WEIGHT, Activation ACTIVATION, bool CHANNELS_LAST, int VECTOR>
__global__ void __launch_bounds__(THREADS, min_blocks(THREADS, 64))
    group_norm_bwd_apply(const __grid_constant__ GroupNormBwdParams params) {
  using Tile = RowTile<THREADS, LOADS, VECTOR>;
  const GroupNormShape& shape = params.shape;
  const int split = blockIdx.x % shape.splits;
  const int64_t group_index = blockIdx.x / shape.splits;
  const int group = group_index % shape.groups;
  const int64_t batch = group_index / shape.groups;
  const int channels = group_channels<CHANNELS_LAST>(shape);
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight) + group * channels;
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias) + group * channels;

  // ---- the two means of the group ----
  const int64_t all_channels = int64_t(shape.groups) * channels;
  const float* dweight = params.partials + batch * shape.splits * all_channels + group * channels;
  const float* dbias = dweight + shape.batch * shape.splits * all_channels;
  Sums means = {0.f, 0.f};
#pragma unroll 2
  for (int64_t i = threadIdx.x; i < int64_t(shape.splits) * channels; i += THREADS) {
    const int channel = i % channels;
    const int64_t share = i / channels * all_channels + channel;
    const float w = to_float(weight[channel]);
    means = means + Sums{w * dweight[share], w * dbias[share]};
  }
  __shared__ Sums scratch[MAX_WARPS];
  means = group_sum<THREADS>(means, scratch);
  means = {means.first * shape.inverse_size, means.second * shape.inverse_size};

  // ---- dx ----
  const float mean = params.stats[2 * group_index], scale = params.stats[2 * group_index + 1];
  const T* x = static_cast<const T*>(params.x) + batch * params.x_strides.batch +
               group * params.x_strides.group;
  const T* dout = static_cast<const T*>(params.dout) + batch * params.dout_strides.batch +
                  group * params.dout_strides.group;
  T* dx = static_cast<T*>(params.dx) + batch * params.dx_strides.batch +
          group * params.dx_strides.group;
  const int size = group_size(shape);
  for (int64_t begin = int64_t(split) * Tile::COLUMNS; begin < size;
       begin += int64_t(shape.splits) * Tile::COLUMNS) {
    const int rest = size - int(begin);
    Pack<T, VECTOR> x_packs[LOADS], dout_packs[LOADS];
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (Tile::column(load) >= rest) continue;
      const Position position = position_of(int(begin) + Tile::column(load), shape);
      x_packs[load] = load_pack<VECTOR>(x + offset(params.x_strides, position));
      dout_packs[load] = load_pack<VECTOR>(dout + offset(params.dout_strides, position));
    }
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (Tile::column(load) >= rest) continue;
      const Position position = position_of(int(begin) + Tile::column(load), shape);
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
}
