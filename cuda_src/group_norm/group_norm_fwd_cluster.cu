// GroupNorm and activation in NCHW of groups that fit into the registers of a cluster of blocks:
// one read, one write (affine.cuh has the formulas). Each block has a piece of the group of one
// sample, and the blocks exchange their moments (cluster_exchange.cuh). Shared memory has moments
// only.
//
// Microseconds on an H200, this kernel for group_norm_fwd_steps in its place (bfloat16, SiLU, 32
// groups):
//   2x640x64x64 12.3 for 17.0, 8x640x64x64 28.5 for 37.8, 8x320x128x128 51.9 for 66.3,
//   8x128x256x256 86.8 for 102.4
// Clusters that go from group to group, with the next one on its way to shared memory, took 12.6,
// 29.6, 54.8 and 85.8.
#include "../norm/cluster_exchange.cuh"
#include "affine.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, int CLUSTER, int NUM_THREADS,
          int LOADS, int VECTOR, int BLOCKS>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(NUM_THREADS, BLOCKS)
    group_norm_fwd_cluster(const __grid_constant__ GroupNormFwdParams params) {
  using Tile = RowTile<NUM_THREADS, LOADS, VECTOR>;
  const GroupNormShape& shape = params.shape;
  const int unit = int(blockIdx.x) / CLUSTER;
  const int sample = unit / shape.groups, first_channel = unit % shape.groups * shape.channels;
  const RowPieces<CLUSTER, VECTOR> pieces(shape.channels * shape.positions);
  const int begin = pieces.begin(pieces.rank()), columns = pieces.size(pieces.rank());
  const auto place = [&](const GroupStrides& strides) {
    return sample * strides.batch + first_channel * strides.channel + begin;
  };

  // ---- read, statistics ----
  __shared__ ClusterExchange<CLUSTER> exchange;
  exchange.init();
  RowPacks<Tile, T> values;
  values.load(static_cast<const T*>(params.x) + place(params.x_strides), columns);
  __shared__ float means[MAX_WARPS];
  __shared__ Sums scratch[MAX_WARPS];
  Moments moments = values.row_moments(columns, rcp_approx(float(columns)), means, scratch);
  const Sums sums = exchange.swap({moments.mean, moments.m2});
  const float count = float(pieces.size(threadIdx.x % CLUSTER));
  moments = sum_of_neighbours<CLUSTER>(Moments{count, sums.first, sums.second});
  const float inverse = inverse_deviation(moments, shape);
  if (params.stats && begin == 0 && threadIdx.x == 0)
    reinterpret_cast<float2*>(params.stats)[unit] = make_float2(moments.mean, inverse);

  // ---- normalise, activate, write ----
  T* out = opaque(static_cast<T*>(params.out) + place(params.out_strides) + Tile::column(0));
  const int rest = Tile::rest(columns), first_pack = begin / VECTOR + threadIdx.x;
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    if (load * Tile::PITCH >= rest) break;
    const int channel = shape.packs.divide(opaque(first_pack) + load * NUM_THREADS);
    const auto affine = affine_of<ACTIVATION, T, 1, WEIGHT>(
        params.weight, params.bias, first_channel + channel, moments.mean, inverse);
    store_words<VECTOR>(out + load * Tile::PITCH, activated(values.packs[load], affine));
  }
}
