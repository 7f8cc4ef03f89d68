// group_norm_fwd with channels last, read once (channel_cluster.cuh).
#include "channel_cluster.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, int NUM_THREADS, int LOADS,
          int VECTOR, int BLOCKS>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(NUM_THREADS, BLOCKS)
    group_norm_fwd_last_sm90(const __grid_constant__ GroupNormFwdParams params) {
  extern __shared__ __align__(16) uint4 smem[];
  const GroupNormShape& shape = params.shape;
  const int unit = blockIdx.x / CLUSTER, rank = cluster_rank();
  const int batch = unit / params.tiling.tiles;
  const ChannelTile<NUM_THREADS, VECTOR> tile(params.tiling, shape,
                                              unit - batch * params.tiling.tiles, rank, CLUSTER, 1);

  // ---- load; after the synchronisation all blocks run, and may be sent to ----
  const SharedPacks<T, NUM_THREADS, LOADS, VECTOR> values(smem);
  auto x = tile.walk(static_cast<const T*>(params.x), params.x_strides, batch);
  values.template copy<0, LOADS / 2>(x, tile.count);
  cp_async_commit();
  values.template copy<LOADS / 2, LOADS>(x, tile.count);
  cp_async_commit();
  const auto weight = tile.template of_channels<WEIGHT>(params.weight);
  const auto bias = tile.template of_channels<WEIGHT>(params.bias);
  cluster_sync();

  // ---- moments: of the columns of this thread, of the groups in this block, in the cluster ----
  ColumnSums<VECTOR> sums;
  cp_async_wait<1>();
  sums.start(values[0]);
#pragma unroll 4
  for (int i = 0; i < LOADS / 2; ++i) {
    if (i < tile.count) sums.add(values[i]);
  }
  cp_async_wait<0>();
#pragma unroll 4
  for (int i = LOADS / 2; i < LOADS; ++i) {
    if (i < tile.count) sums.add(values[i]);
  }
  __shared__ ClusterValues<Moments> moments;
  tile.moments(sums, [&](int own, Moments of_block) { moments.send(own, of_block); });
  cluster_sync();
  __shared__ float stats[2 * TILE_GROUPS];
  for (int own = threadIdx.x; own < tile.groups; own += NUM_THREADS) {
    const Moments of_group = moments.sum(own, tile.filled);
    const float inverse = rsqrtf(of_group.m2 * shape.inverse_size + shape.eps);
    stats[2 * own] = of_group.mean;
    stats[2 * own + 1] = inverse;
    if (params.stats == nullptr || rank > 0) continue;
    float* all = params.stats + 2 * (int64_t(batch) * shape.groups + tile.group + own);
    all[0] = of_group.mean;
    all[1] = inverse;
  }
  __syncthreads();

  // ---- apply ----
  float scales[VECTOR];
  const auto affine = tile.affine(stats, weight, bias, scales);
  auto out = tile.walk(static_cast<T*>(params.out), params.out_strides, batch);
#pragma unroll 1
  for (int i = 0; i < tile.count; ++i)
    store_words<VECTOR, true>(out.next(), activated<ACTIVATION>(values[i], affine));
}
