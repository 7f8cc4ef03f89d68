// Channels last: a block has some positions of the channels side by side in its tile. A thread
// keeps to VECTOR channels, in LOADS positions.
#pragma once
#include "group_tile.cuh"

constexpr int CHANNEL_THREADS = 256;

template <int LOADS, int VECTOR>
struct ChannelTile {
  int group;        // the first one of the tile
  int groups;       // of the tile
  int group_width;  // channels that the tile has of each of them
  int channel;      // the first one of the tile
  int part;         // which part of the group the tile is
  int row_packs;    // packs of a position
  int rows;         // positions side by side
  int begin;        // the first position
  int end;          // of all positions

  __device__ ChannelTile(const ChannelTiling& tiling, const GroupNormShape& shape, int piece) {
    const int turn = piece / tiling.tiles, tile = piece - turn * tiling.tiles;
    part = tile % tiling.parts;
    group = tile / tiling.parts * tiling.groups;
    groups = min(tiling.groups, shape.groups - group);
    const int skipped = part * tiling.channels;
    channel = group * shape.channels + skipped;
    group_width =
        tiling.parts > 1 ? min(tiling.channels, shape.channels - skipped) : shape.channels;
    row_packs = ceil_div(tiling.channels, VECTOR);
    rows = CHANNEL_THREADS / row_packs;
    begin = turn * rows * LOADS;
    end = shape.positions;
  }

  __device__ int row() const { return int(threadIdx.x) / row_packs; }
  // The first channel of this thread, counted from that of the tile.
  __device__ int column() const { return int(threadIdx.x) % row_packs * VECTOR; }
  __device__ bool active() const { return row() < rows && column() < groups * group_width; }
  __device__ int position(int load) const { return begin + load * rows + row(); }
  __device__ bool has(int load) const { return active() && position(load) < end; }

  // How many positions a row of threads has.
  __device__ int count(int row) const {
    return max(0, min(LOADS, ceil_div(end - begin - row, rows)));
  }

  // Calls visit(group, lane, lanes): so many threads have a group of the tile. All threads call it;
  // beyond the last group there is nothing to do but to take part in shuffles.
  template <class Visit>
  __device__ void each_group(Visit visit) const {
    int lanes = 32;
    while (lanes > 1 && lanes * groups > CHANNEL_THREADS) lanes /= 2;
    for (int first = 0; first < groups; first += CHANNEL_THREADS / lanes)
      visit(first + int(threadIdx.x) / lanes, int(threadIdx.x) % lanes, lanes);
  }

  // Calls visit(i, group) for each channel of this thread.
  template <class Visit>
  __device__ void each_channel_group(Visit visit) const {
    int own = group + column() / group_width, rest = column() % group_width;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      visit(i, own);
      if (++rest == group_width) ++own, rest = 0;
    }
  }

  // What this thread's channels need, from the mean and 1 / deviation of their groups in `stats`.
  template <typename WEIGHT>
  __device__ Affine<VECTOR> affine(const float* stats, const WEIGHT* weight, const WEIGHT* bias,
                                   float (&scales)[VECTOR]) const {
    Affine<VECTOR> result;
    each_channel_group([&](int i, int group) {
      const int index = channel + column() + i;
      scales[i] = stats[2 * group + 1];
      result.mean[i] = stats[2 * group];
      result.scale[i] = scales[i] * to_float(weight[index]);
      result.bias[i] = to_float(bias[index]);
    });
    return result;
  }
};
