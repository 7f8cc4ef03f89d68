// GroupNorm and activation of groups that fit into registers, channels first: one read, one write.
//   out = activation((x - mean) / sqrt(variance + eps) * weight + bias)
//
// ROW_THREADS threads, or the blocks of a cluster with so many threads each, have a group of one
// sample, which is contiguous.
#pragma once
#include "cluster_sum.cuh"
#include "group_tile.cuh"

template <class Tile, int CLUSTER, Layout LAYOUT, Activation ACTIVATION, typename T,
          typename WEIGHT>
__device__ __forceinline__ void group_fwd(const GroupNormFwdParams& params) {
  // ---- which part of which group ----
  const GroupNormShape& shape = params.shape;
  const GroupPart<Tile, CLUSTER, LAYOUT> part(shape);
  const int index = int(blockIdx.x) / CLUSTER * Tile::ROWS + Tile::row();
  const int batch = index / shape.groups;
  const int first_channel = (index - batch * shape.groups) * shape.channels;
  const int columns = batch < shape.batch ? part.columns : 0;

  // ---- read, statistics ----
  RowPacks<Tile, T> values;
  values.load(static_cast<const T*>(params.x) + batch * params.x_strides.batch +
                  first_channel * params.x_strides.channel + part.begin,
              columns);
  __shared__ float means[MAX_WARPS];
  __shared__ Sums scratch[MAX_WARPS];
  Moments moments = values.row_moments(
      columns, CLUSTER > 1 ? rcp_approx(float(max(columns, 1))) : shape.inverse_size, means,
      scratch);
  if constexpr (CLUSTER > 1) {
    __shared__ Moments slot;
    moments = cluster_sum<CLUSTER>(moments, slot);
  }
  const float scale = rsqrtf(moments.m2 * shape.inverse_size + shape.eps);
  if (params.stats && columns && part.begin == 0 && threadIdx.x % Tile::ROW_THREADS == 0) {
    params.stats[2 * int64_t(index)] = moments.mean;
    params.stats[2 * int64_t(index) + 1] = scale;
  }

  // ---- normalise, activate, write ----
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight);
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias);
  T* out = opaque(static_cast<T*>(params.out) + batch * params.out_strides.batch +
                  first_channel * params.out_strides.channel + part.begin + Tile::column(0));
  const int rest = Tile::rest(columns);
#pragma unroll
  for (int load = 0; load < Tile::LOADS; ++load) {
    if (load * Tile::PITCH >= rest) break;
    const int channel = first_channel + part.channel(shape, load);
    const auto affine =
        affine_of<part.CHANNELS>(weight + channel, bias + channel, moments.mean, scale);
    store_words<Tile::VECTOR>(out + load * Tile::PITCH,
                              activated<ACTIVATION>(values.packs[load], affine));
  }
  if constexpr (CLUSTER > 1)
    cluster_sync();  // a block's shared memory lasts until all have read it
}
