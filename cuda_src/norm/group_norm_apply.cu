// The second pass over groups that do not fit into the registers of a block, after
// group_norm_stats: merge the statistics of the splits, normalise, activate.
#include "group_tile.cuh"

constexpr int THREADS = 256;
constexpr int LOADS = 2;

template <typename T, typename WEIGHT, Activation ACTIVATION, bool CHANNELS_LAST, int VECTOR>
__global__ void __launch_bounds__(THREADS, min_blocks(THREADS, 64))
    group_norm_apply(const __grid_constant__ GroupNormFwdParams params) {
  using Tile = RowTile<THREADS, LOADS, VECTOR>;
  const GroupNormShape& shape = params.shape;
  const int split = blockIdx.x % shape.splits;
  const int64_t group_index = blockIdx.x / shape.splits;
  const int group = group_index % shape.groups;
  const int64_t batch = group_index / shape.groups;

  // ---- statistics ----
  const Moments* partials =
      reinterpret_cast<const Moments*>(params.partials) + group_index * shape.splits;
  Moments moments = {0.f, 0.f, 0.f};
  for (int i = threadIdx.x; i < shape.splits; i += THREADS) moments = moments + partials[i];
  __shared__ Moments scratch[MAX_WARPS];
  moments = group_sum<THREADS>(moments, scratch);
  const float scale = rsqrtf(moments.m2 * shape.inverse_size + shape.eps);
  if (params.stats && split == 0 && threadIdx.x == 0) {
    params.stats[2 * group_index] = moments.mean;
    params.stats[2 * group_index + 1] = scale;
  }

  // ---- normalise, activate ----
  const T* x = static_cast<const T*>(params.x) + batch * params.x_strides.batch +
               group * params.x_strides.group;
  T* out = static_cast<T*>(params.out) + batch * params.out_strides.batch +
           group * params.out_strides.group;
  const int first_channel = group * group_channels<CHANNELS_LAST>(shape);
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight) + first_channel;
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias) + first_channel;
  const int size = group_size(shape);
  for (int64_t begin = int64_t(split) * Tile::COLUMNS; begin < size;
       begin += int64_t(shape.splits) * Tile::COLUMNS) {
    const int rest = size - int(begin);
    Pack<T, VECTOR> values[LOADS];
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (Tile::column(load) >= rest) continue;
      const Position position = position_of(int(begin) + Tile::column(load), shape);
      values[load] = load_pack<VECTOR>(x + offset(params.x_strides, position));
    }
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (Tile::column(load) >= rest) continue;
      const Position position = position_of(int(begin) + Tile::column(load), shape);
      const auto weights = load_channels<CHANNELS_LAST, VECTOR>(weight, position);
      const auto biases = load_channels<CHANNELS_LAST, VECTOR>(bias, position);
      store_pack<VECTOR>(out + offset(params.out_strides, position),
                         activated<ACTIVATION>(values[load], moments.mean, scale, weights, biases));
    }
  }
}
