// GroupNorm and activation of groups that fit into registers, channels first: one read, one write.
//   out = activation((x - mean) / sqrt(variance + eps) * weight + bias)
//
// ROW_THREADS threads have a group of one sample, as the packs of its channels one after the other.
#include "group_tile.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, Layout LAYOUT, int ROW_THREADS,
          int LOADS, int VECTOR, int BLOCKS>
__global__ void __launch_bounds__(block_threads(ROW_THREADS), BLOCKS)
    group_norm_fwd(const __grid_constant__ GroupNormFwdParams params) {
  // ---- which group ----
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR>;
  constexpr int CHANNELS = pack_channels<LAYOUT, VECTOR>();
  const GroupNormShape& shape = params.shape;
  const int index = int(blockIdx.x) * Tile::ROWS + Tile::row(), batch = index / shape.groups;
  const int first_channel = (index - batch * shape.groups) * shape.channels;
  const int size = batch < shape.batch ? shape.channels * shape.positions : 0;
  // The channel of a load; packs of several channels lie side by side in memory.
  const auto channel_of = [&](int element) {
    return CHANNELS > 1 ? element / VECTOR * CHANNELS : shape.packs.divide(element / VECTOR);
  };

  // ---- read, statistics ----
  const T* x = static_cast<const T*>(params.x) + batch * params.x_strides.batch +
               first_channel * params.x_strides.channel;
  RowPacks<Tile, T> values;
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int element = Tile::column(load), channel = channel_of(element);
    if (element >= size) continue;
    const int64_t gap = params.x_strides.channel - shape.positions;  // between channels
    values.packs[load] = load_words<VECTOR, true>(x + element + channel * gap);
  }
  __shared__ float means[MAX_WARPS];
  __shared__ Sums scratch[MAX_WARPS];
  const Moments moments = values.row_moments(size, shape.inverse_size, means, scratch);
  const float scale = rsqrtf(moments.m2 * shape.inverse_size + shape.eps);
  if (params.stats && size && threadIdx.x % ROW_THREADS == 0) {
    params.stats[2 * int64_t(index)] = moments.mean;
    params.stats[2 * int64_t(index) + 1] = scale;
  }

  // ---- normalise, activate, write ----
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight) + first_channel;
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias) + first_channel;
  T* out = static_cast<T*>(params.out) + batch * params.out_strides.batch +
           first_channel * params.out_strides.channel;
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int element = opaque(Tile::column(load)), channel = channel_of(element);
    if (element >= size) continue;
    const int64_t gap = params.out_strides.channel - shape.positions;
    const auto affine = affine_of<CHANNELS>(weight + channel, bias + channel, moments.mean, scale);
    store_words<VECTOR>(out + element + channel * gap,
                        activated<ACTIVATION>(values.packs[load], affine));
  }
}
