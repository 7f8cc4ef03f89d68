// GroupNorm and activation in NCHW of groups that fit into the registers of a cluster of blocks:
// one read, one write (affine.cuh has the formulas).
//
// A cluster has the group of one sample after the other, each of its warps a run of it, which the
// copy engine has brought into shared memory meanwhile (run_ring.cuh has the argument why nothing
// is overwritten). A warp waits for its own copies, and for the moments of all warps of the cluster
// (cluster_exchange.cuh).
//
// Microseconds on an H200, this kernel for group_norm_fwd_steps in its place (bfloat16, SiLU, 32
// groups):
//   2x640x64x64 12.8 for 16.7, 8x640x64x64 30.1 for 37.6, 8x320x128x128 54.8 for 66.9,
//   8x128x256x256 84.0 for 101.5
#include "../norm/cluster_exchange.cuh"
#include "run_ring.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, int CLUSTER, int NUM_THREADS,
          int LOADS, int VECTOR, int BLOCKS>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(NUM_THREADS, BLOCKS)
    group_norm_fwd_cluster(const __grid_constant__ GroupNormFwdParams params) {
  // ---- which run of which groups ----
  extern __shared__ __align__(16) char smem[];
  using Tile = RowTile<32, LOADS, VECTOR, NUM_THREADS>;  // of a warp
  using Ring = RunRing<T, 1, LOADS, VECTOR, 5>;
  constexpr int WARPS = NUM_THREADS / 32, SENDERS = CLUSTER * WARPS;
  constexpr int PITCH = Tile::PITCH, PIECE = Ring::PIECE;
  using Rounds = ClusterRounds<CLUSTER, WARPS>;
  const GroupNormShape& shape = params.shape;
  const int size = shape.channels * shape.positions;
  const int run = ceil_div(size, SENDERS * PITCH) * PITCH;  // of each warp but the last ones
  const auto columns_of = [&](int begin) { return max(0, min(size - begin, run)); };
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int begin = uniform(Rounds::sender()) * run, columns = columns_of(begin);
  const int units = int(shape.batch) * shape.groups, step = int(gridDim.x) / CLUSTER;
  int unit = int(blockIdx.x) / CLUSTER;
  const auto place = [&](const GroupStrides& strides, int of) {
    const int sample = of / shape.groups, group = of - sample * shape.groups;
    return sample * strides.batch + group * shape.channels * strides.channel + begin;
  };

  // ---- the first one ----
  __shared__ uint64_t barriers[WARPS][Ring::BARRIERS];
  const Ring ring = {smem_address(smem) + warp * Ring::BYTES, smem_address(barriers[warp]),
                     columns};
  const T* x = static_cast<const T*>(params.x);
  const auto fill = [&](int piece, const T* from) {
    if (elect_one()) ring.fill(0, piece, from);
  };
  if (elect_one()) ring.init();
  __syncwarp();
  for (int piece = 0; piece < Ring::PIECES && ring.has(piece); ++piece)
    fill(piece, x + place(params.x_strides, unit));
  __shared__ Rounds rounds;
  rounds.init();

  const int rest = columns - Tile::column(0);  // from this lane's first pack on
  const float count = float(max(0, ceil_div(rest, PITCH)) * VECTOR);
  const float share = count > 0.f ? 1.f / count : 0.f;
  const float inverse = columns ? 1.f / float(columns) : 0.f;
#pragma unroll 1
  for (int round = 0; unit < units; unit += step, ++round) {
    // ---- into registers ----
    const T* next = x + place(params.x_strides, unit + step);
    RowPacks<Tile, T> values;
#pragma unroll
    for (int piece = 0; piece < Ring::PIECES; ++piece) {
      if (!ring.has(piece)) break;
      ring.wait(0, piece, round % 2);
      uint32_t loaded = 0;
#pragma unroll
      for (int load = piece * PIECE; load < (piece + 1) * PIECE; ++load) {
        values.packs[load] = ring.read(0, load);
        loaded |= values.packs[load].words[0];
      }
      wait_for_loads(loaded);
      __syncwarp();
      if (unit + step < units) fill(piece, next);
    }

    // ---- moments of the lane, the warp, the group ----
    // Of deviations from the mean of the lane's first pack, as in row_moments().
    float mean = 0.f;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) mean += values.at(0, i);
    mean = rest > 0 ? mean * (1.f / VECTOR) : 0.f;
    Moments moments = moments_of(count, share, mean, values.deviations(columns, mean));
    moments = moments_of_neighbours<32>(moments, inverse);
    rounds.send(round, {moments.mean, moments.m2});
    const Sums* sent = rounds.wait(round);
    const auto moments_from = [&](int sender) {
      return Moments{float(columns_of(sender * run)), sent[sender].first, sent[sender].second};
    };
    constexpr int LANES = SENDERS < 32 ? SENDERS : 32;
    moments = moments_from(lane % LANES);
#pragma unroll
    for (int i = LANES; i < SENDERS; i += LANES) moments = moments + moments_from(lane + i);
    moments = moments_of_neighbours<LANES>(moments, shape.inverse_size);
    const float inverse_of_group = inverse_deviation(moments, shape);
    if (params.stats && begin == 0 && threadIdx.x == 0)
      reinterpret_cast<float2*>(params.stats)[unit] = make_float2(moments.mean, inverse_of_group);

    // ---- normalise, activate, write ----
    const int first_channel = unit % shape.groups * shape.channels;
    T* out =
        opaque(static_cast<T*>(params.out) + place(params.out_strides, unit) + Tile::column(0));
    const int first_pack = begin / VECTOR + lane;
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (load * PITCH >= rest) break;
      const int channel = shape.packs.divide(opaque(first_pack) + load * 32);
      const auto affine = affine_of<ACTIVATION, T, 1, WEIGHT>(
          params.weight, params.bias, first_channel + channel, moments.mean, inverse_of_group);
      store_words<VECTOR>(out + load * PITCH, activated(values.packs[load], affine));
    }
  }
}
