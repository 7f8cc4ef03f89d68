// GroupNorm and activation of groups that fit into the registers of a block: one read, one write.
//   out = activation((x - mean) / sqrt(variance + eps) * weight + bias)
//
// A block has one group of one sample. Blocks of neighbouring groups follow each other, so that
// with channels last they share the cache lines that their groups share.
#include "group_tile.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, bool CHANNELS_LAST, int NUM_THREADS,
          int LOADS, int VECTOR>
__global__ void __launch_bounds__(NUM_THREADS, min_blocks(NUM_THREADS, 64))
    group_norm_fwd(const __grid_constant__ GroupNormFwdParams params) {
  using Tile = RowTile<NUM_THREADS, LOADS, VECTOR>;
  const GroupNormShape& shape = params.shape;
  const int size = group_size(shape);
  const int group = blockIdx.x % shape.groups;
  const int64_t batch = blockIdx.x / shape.groups;
  const T* x = static_cast<const T*>(params.x) + batch * params.x_strides.batch +
               group * params.x_strides.group;

  // ---- read, statistics ----
  RowPacks<Tile, T> values;
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int element = Tile::column(load);
    if (element >= size) continue;
    values.packs[load] =
        load_pack<VECTOR>(x + offset(params.x_strides, position_of(element, shape)));
  }
  __shared__ Moments scratch[MAX_WARPS];
  const Moments moments = group_sum<NUM_THREADS>(values.moments(size), scratch);
  const float scale = rsqrtf(moments.m2 * shape.inverse_size + shape.eps);
  if (params.stats && threadIdx.x == 0) {
    params.stats[2 * int64_t(blockIdx.x)] = moments.mean;
    params.stats[2 * int64_t(blockIdx.x) + 1] = scale;
  }

  // ---- normalise, activate, write ----
  const int first_channel = group * group_channels<CHANNELS_LAST>(shape);
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight) + first_channel;
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias) + first_channel;
  T* out = static_cast<T*>(params.out) + batch * params.out_strides.batch +
           group * params.out_strides.group;
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int element = Tile::column(load);
    if (element >= size) continue;
    const Position position = position_of(element, shape);
    const auto weights = load_channels<CHANNELS_LAST, VECTOR>(weight, position);
    const auto biases = load_channels<CHANNELS_LAST, VECTOR>(bias, position);
    values.packs[load] =
        activated<ACTIVATION>(values.packs[load], moments.mean, scale, weights, biases);
  }
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int element = Tile::column(load);
    if (element >= size) continue;
    store_pack<VECTOR>(out + offset(params.out_strides, position_of(element, shape)),
                       values.packs[load]);
  }
}
