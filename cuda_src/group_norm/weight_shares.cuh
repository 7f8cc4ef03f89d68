// Gradients of weight and bias from the sums of the packs, in the launch that has made those: each
// block writes its share of them, and the last block that has a group adds up its shares. Nobody
// waits, and the order of the additions does not depend on which block is the last. A launch of its
// own for the sums takes 2 to 4 us more on an H200: 2x320x64x64 17.1 for 14.6, 4096x256x16 33.6 for
// 29.3.
//
// Why the last block has all shares:
//   - A block's stores of its shares come before its count, because a __syncthreads() lies between
//     them and count_in() has a fence before the count.
//   - The counts of all other blocks come before that of the last one, because count_in() returns
//     their number, and only the last block finds all of them.
//   - The last block's count comes before its loads of the shares, because count_in() has a fence
//     after the count, a __syncthreads() follows, and the loads do not use L1 (ld_global_cg).
//   - The next launch counts from 0, because a counter wraps at the last count.
#pragma once
#include "../ptx/atomics.cuh"
#include "affine.cuh"

// Writes share `share` of a group, which has up to `shares`: the sum of `slots` for each channel.
// `slots` holds the sums of the packs of the group (or of a part of it that begins with element
// `begin`), in ROWS rows that are `stride` apart.
template <int CHANNELS, class Tile, int UNROLL = 1>
__device__ __forceinline__ void write_share(const GroupNormBwdParams& params, const Sums* slots,
                                            int stride, int begin, int columns, int group,
                                            int share, int shares) {
  const GroupNormShape& shape = params.shape;
  float2* const partials = reinterpret_cast<float2*>(params.partials);
  const int channel_slots = CHANNELS > 1 ? 1 : shape.positions / Tile::VECTOR;
  const int first_slot = begin / Tile::VECTOR, last_slot = columns / (Tile::VECTOR / CHANNELS);
  const int lanes = lanes_for(channel_slots);
  for (int i = 0; i < shape.channels; i += Tile::THREADS / lanes) {
    const int channel = i + int(threadIdx.x) / lanes, slot = channel * channel_slots - first_slot;
    const int end = channel < shape.channels ? min(slot + channel_slots, last_slot) : 0;
    Sums sums = {0.f, 0.f};
#pragma unroll UNROLL
    for (int j = max(slot, 0) + int(threadIdx.x) % lanes; j < end; j += lanes) {
#pragma unroll 4
      for (int row = 0; row < Tile::ROWS; ++row) sums = sums + slots[row * stride + j];
    }
    sums = sum_of_lanes(sums, lanes);
    if (channel >= shape.channels || threadIdx.x % lanes > 0) continue;
    partials[(int64_t(group) * shape.channels + channel) * shares + share] =
        make_float2(sums.first, sums.second);
  }
}

// Counts on counters 0 to `number` - 1, of which there are up to 32, and returns a bit mask of
// those on which the count_of(i) - 1 other blocks have counted before. All threads of a block call
// it.
template <class CounterOf, class CountOf>
__device__ __forceinline__ unsigned count_in_last(int number, CounterOf counter_of,
                                                  CountOf count_of) {
  __shared__ unsigned result;
  __syncthreads();
  const int i = threadIdx.x;
  if (i < 32) {
    bool last = false;
    if (i < number) {
      const int others = count_of(i) - 1;
      last = count_in(counter_of(i), others) == others;
    }
    const unsigned all = __ballot_sync(0xffffffffu, last);
    if (i == 0) result = all;
  }
  __syncthreads();
  return result;
}

// Adds up dweight and dbias of all groups of a counter. A group has up to `shares` shares, group i
// has shares_of(i).
template <class Tile, typename WEIGHT, class SharesOf>
__device__ __forceinline__ void sum_shares(const GroupNormBwdParams& params, int counter,
                                           int shares, SharesOf shares_of) {
  const GroupNormShape& shape = params.shape;
  const int groups = (shape.groups - counter + GROUP_COUNTERS - 1) / GROUP_COUNTERS;
  const unsigned channels = groups * shape.channels;
  // Waiting for the shares takes most of the time, so all channels are loaded at once, unless they
  // are too many.
  int share_lanes = lanes_for(shares);
  while (share_lanes > 1 && channels > unsigned(Tile::THREADS / share_lanes)) share_lanes /= 2;
  for (unsigned i = 0; i < channels; i += Tile::THREADS / share_lanes) {
    const unsigned index = i + threadIdx.x / share_lanes;
    const int group = index / shape.channels * GROUP_COUNTERS + counter;
    const int channel = group * shape.channels + index % shape.channels;
    const int count = index < channels ? shares_of(group) : 0;
    const float2* from =
        reinterpret_cast<const float2*>(params.partials) + int64_t(channel) * shares;
    Sums sums = {0.f, 0.f};
#pragma unroll 8
    for (int j = threadIdx.x % share_lanes; j < count; j += share_lanes) {
      const float2 one = ld_global_cg(from + j);
      sums = sums + Sums{one.x, one.y};
    }
    sums = sum_of_lanes(sums, share_lanes);
    if (index >= channels || threadIdx.x % share_lanes > 0) continue;
    static_cast<WEIGHT*>(params.dweight)[channel] = from_float<WEIGHT>(sums.first);
    static_cast<WEIGHT*>(params.dbias)[channel] = from_float<WEIGHT>(sums.second);
  }
}

// Adds up the groups of which this block, which has written its shares of groups `first` to `last`,
// is the last one.
template <class Tile, typename WEIGHT, class SharesOf>
__device__ __forceinline__ void add_up_shares(const GroupNormBwdParams& params, int first, int last,
                                              int shares, SharesOf shares_of) {
  for (; first <= last; first += 32) {
    const auto counter = [&](int i) { return (first + i) % GROUP_COUNTERS; };
    const auto blocks = [&](int i) {
      int sum = 0;
      for (int group = counter(i); group < params.shape.groups; group += GROUP_COUNTERS)
        sum += shares_of(group);
      return sum;
    };
    unsigned finished = count_in_last(
        last + 1 - first, [&](int i) { return params.counters + counter(i); }, blocks);
    for (; finished; finished &= finished - 1)
      sum_shares<Tile, WEIGHT>(params, counter(__ffs(finished) - 1), shares, shares_of);
  }
}

// Does both where a block has one group all the time, which params.shares blocks have.
template <int CHANNELS, class Tile, typename WEIGHT>
__device__ __forceinline__ void add_up_group(const GroupNormBwdParams& params, const Sums* slots,
                                             int stride) {
  const int block = opaque(int(blockIdx.x));  // opaque: not kept in registers until now
  const int share = block / params.shape.groups, group = block - share * params.shape.groups;
  const int columns = params.shape.channels * params.shape.positions;
  write_share<CHANNELS, Tile>(params, slots, stride, 0, columns, group, share, params.shares);
  add_up_shares<Tile, WEIGHT>(params, group, group, params.shares,
                              [&](int) { return params.shares; });
}
