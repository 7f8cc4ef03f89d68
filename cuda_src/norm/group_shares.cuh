// Gradients of weight and bias from the sums of the packs, in the launch that has made those.
#pragma once
#include "group_tile.cuh"
#include "last_block.cuh"

// `slots` are the sums of the packs of a group (or of a part of it that begins with element
// `begin`) for each of their channels, ROWS times `stride` of them. They are added up for each
// channel and are this block's share, and the last block of a group adds up the shares.
template <int CHANNELS, class Tile, int CLUSTER, typename WEIGHT>
__device__ __forceinline__ void add_up_shares(const GroupNormBwdParams& params, const Sums* slots,
                                              int stride, int begin, int columns) {
  const GroupNormShape& shape = params.shape;
  const int block = opaque(int(blockIdx.x)) / CLUSTER;  // not kept in registers until now
  const int group = block % shape.groups, shares = params.shares * CLUSTER;
  const int share = block / shape.groups * CLUSTER + blockIdx.x % CLUSTER;
  float2* const partials = reinterpret_cast<float2*>(params.partials);
  const int channel_slots = CHANNELS > 1 ? 1 : shape.positions / Tile::VECTOR;
  const int first_slot = begin / Tile::VECTOR, last_slot = columns / (Tile::VECTOR / CHANNELS);
  const int lanes = lanes_for(channel_slots);
  for (int i = 0; i < shape.channels; i += Tile::THREADS / lanes) {
    const int channel = i + int(threadIdx.x) / lanes, slot = channel * channel_slots - first_slot;
    const int end = channel < shape.channels ? min(slot + channel_slots, last_slot) : 0;
    Sums sums = {0.f, 0.f};
    for (int j = max(slot, 0) + int(threadIdx.x) % lanes; j < end; j += lanes) {
#pragma unroll 4
      for (int row = 0; row < Tile::ROWS; ++row) sums = sums + slots[row * stride + j];
    }
    sums = sum_of_lanes(sums, lanes);
    if (channel >= shape.channels || threadIdx.x % lanes > 0) continue;
    partials[(int64_t(group) * shape.channels + channel) * shares + share] =
        make_float2(sums.first, sums.second);
  }

  const int counter = group % GROUP_COUNTERS;
  const int groups = (shape.groups - counter + GROUP_COUNTERS - 1) / GROUP_COUNTERS;
  if (!is_last_block(params.counters + counter, groups * shares)) return;
  const unsigned channels = groups * shape.channels;  // of all groups of this counter
  // What takes time is to wait for the shares, so all channels at once unless they are too many.
  int share_lanes = lanes_for(shares);
  while (share_lanes > 1 && channels > unsigned(Tile::THREADS / share_lanes)) share_lanes /= 2;
  for (unsigned i = 0; i < channels; i += Tile::THREADS / share_lanes) {
    const unsigned index = i + threadIdx.x / share_lanes, row = index / shape.channels;
    const int channel = (row * GROUP_COUNTERS + counter) * shape.channels + index % shape.channels;
    const float2* from = partials + int64_t(channel) * shares;
    Sums sums = {0.f, 0.f};
#pragma unroll 8
    for (int j = threadIdx.x % share_lanes; j < (index < channels ? shares : 0); j += share_lanes) {
      const float2 one = ld_global_cg(from + j);
      sums = sums + Sums{one.x, one.y};
    }
    sums = sum_of_lanes(sums, share_lanes);
    if (index >= channels || threadIdx.x % share_lanes > 0) continue;
    static_cast<WEIGHT*>(params.dweight)[channel] = from_float<WEIGHT>(sums.first);
    static_cast<WEIGHT*>(params.dbias)[channel] = from_float<WEIGHT>(sums.second);
  }
}
