// GroupNorm and activation of groups that fit into registers, channels first: one read, one write.
//   out = activation((x - mean) / sqrt(variance + eps) * weight + bias)
//
// ROW_THREADS threads have a group of one sample, which is contiguous.
#include "group_tile.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, Layout LAYOUT, int ROW_THREADS,
          int LOADS, int VECTOR, int BLOCKS>
__global__ void __launch_bounds__(block_threads(ROW_THREADS), BLOCKS)
    group_norm_fwd(const __grid_constant__ GroupNormFwdParams params) {
  // ---- which group ----
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR>;
  const GroupNormShape& shape = params.shape;
  const GroupPart<Tile, LAYOUT> part(shape);
  const int index = int(blockIdx.x) * Tile::ROWS + Tile::row();
  const int batch = index / shape.groups;
  const int first_channel = (index - batch * shape.groups) * shape.channels;
  const int columns = batch < shape.batch ? part.columns : 0;

  // ---- read, statistics ----
  RowPacks<Tile, T> values;
  values.load(static_cast<const T*>(params.x) + batch * params.x_strides.batch +
                  first_channel * params.x_strides.channel,
              columns);
  __shared__ float means[MAX_WARPS];
  __shared__ Sums scratch[MAX_WARPS];
  const Moments moments = values.row_moments(columns, shape.inverse_size, means, scratch);
  const float scale = rsqrtf(moments.m2 * shape.inverse_size + shape.eps);
  if (params.stats && columns && threadIdx.x % ROW_THREADS == 0) {
    params.stats[2 * int64_t(index)] = moments.mean;
    params.stats[2 * int64_t(index) + 1] = scale;
  }

  // ---- normalise, activate, write ----
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight);
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias);
  T* out = opaque(static_cast<T*>(params.out) + batch * params.out_strides.batch +
                  first_channel * params.out_strides.channel + Tile::column(0));
  const int rest = Tile::rest(columns);
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    if (load * Tile::PITCH >= rest) break;
    const int channel = first_channel + part.channel(shape, load);
    const auto affine =
        affine_of<part.CHANNELS>(weight + channel, bias + channel, moments.mean, scale);
    store_words<VECTOR>(out + load * Tile::PITCH,
                        activated<ACTIVATION>(values.packs[load], affine));
  }
}
