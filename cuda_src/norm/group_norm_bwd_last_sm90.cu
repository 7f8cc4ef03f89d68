// group_norm_bwd with channels last, read once (channel_cluster.cuh).
#include "channel_cluster.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, int NUM_THREADS, int LOADS,
          int VECTOR, int BLOCKS>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(NUM_THREADS, BLOCKS)
    group_norm_bwd_last_sm90(const __grid_constant__ GroupNormBwdParams params) {
  extern __shared__ __align__(16) uint4 smem[];
  const GroupNormShape& shape = params.shape;
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight);
  const int unit = blockIdx.x / CLUSTER, rank = cluster_rank();
  const int batch = unit / params.tiling.tiles;
  const ChannelTile<NUM_THREADS, VECTOR> tile(params.tiling, shape,
                                              unit - batch * params.tiling.tiles, rank, CLUSTER, 1);

  // ---- load; after the synchronisation all blocks run, and may be sent to ----
  using Packs = SharedPacks<T, NUM_THREADS, LOADS, VECTOR>;
  const Packs values(smem), gradients(smem + LOADS * NUM_THREADS);
  auto x = tile.walk(static_cast<const T*>(params.x), params.x_strides, batch);
  auto dout = tile.walk(static_cast<const T*>(params.dout), params.dout_strides, batch);
  values.template copy<0, LOADS / 2>(x, tile.count);
  gradients.template copy<0, LOADS / 2>(dout, tile.count);
  cp_async_commit();
  values.template copy<LOADS / 2, LOADS>(x, tile.count);
  gradients.template copy<LOADS / 2, LOADS>(dout, tile.count);
  cp_async_commit();
  float scales[VECTOR];
  const auto affine = tile.affine(params.stats + 2 * (int64_t(batch) * shape.groups + tile.group),
                                  tile.template of_channels<WEIGHT>(params.weight),
                                  tile.template of_channels<WEIGHT>(params.bias), scales);
  cluster_sync();

  // ---- sums: of the columns of this thread, of the channels in this block ----
  Sums sums[VECTOR] = {};
  cp_async_wait<1>();
#pragma unroll 2
  for (int i = 0; i < LOADS / 2; ++i) {
    if (i < tile.count) add_to_sums<ACTIVATION>(values[i], gradients[i], affine, sums);
  }
  cp_async_wait<0>();
#pragma unroll 2
  for (int i = LOADS / 2; i < LOADS; ++i) {
    if (i < tile.count) add_to_sums<ACTIVATION>(values[i], gradients[i], affine, sums);
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) sums[i].first *= scales[i];
  __shared__ Sums columns[NUM_THREADS * VECTOR];
  tile.channel_sums(sums, columns, [](int) {});
  __syncthreads();

  // ---- of the groups and the channels, in the cluster ----
  __shared__ ClusterValues<Sums> means;
  tile.each_group([&](int own, int width, int lane, int lanes) {
    Sums sum = {0.f, 0.f};
    for (int i = lane; i < width; i += lanes) {
      const int column = own * width + i;
      const float w = to_float(weight[tile.channel + column]);
      sum = sum + Sums{w * columns[column].first, w * columns[column].second};
    }
    sum = sum_of_lanes(sum, lanes);
    if (lane == 0 && width) means.send(own, sum);
  });
  cluster_sync();
  const int all_channels = shape.groups * shape.channels;
  for (int i = threadIdx.x * CLUSTER + rank; i < tile.channels(); i += NUM_THREADS * CLUSTER) {
    Sums sum = {0.f, 0.f};
#pragma unroll
    for (int other = 0; other < CLUSTER; ++other) sum = sum + *cluster_shared(columns + i, other);
    float* share = params.partials + int64_t(batch) * all_channels + tile.channel + i;
    share[0] = sum.first;
    share[shape.batch * all_channels] = sum.second;
  }
  InputGradient constants[VECTOR];
  tile.each_channel_group([&](int i, int own) {
    const Sums sum = means.sum(own, CLUSTER);
    constants[i] = input_gradient(
        scales[i], {sum.first * shape.inverse_size, sum.second * shape.inverse_size});
  });

  // ---- apply ----
  auto dx = tile.walk(static_cast<T*>(params.dx), params.dx_strides, batch);
#pragma unroll 2
  for (int i = 0; i < tile.count; ++i) {
    store_words<VECTOR, true>(dx.next(),
                              gradient_of<ACTIVATION>(values[i], gradients[i], affine, constants));
  }
  cluster_sync();  // the others read the sums of this block
}
