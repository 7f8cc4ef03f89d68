// Channels last: a block has a share of the positions, and of each the channels side by side in its
// tile. A thread keeps to one pack of channels and walks down the positions, `rows` at a time.
#pragma once
#include "group_tile.cuh"

// Packs of one column of a tensor, one position of a thread after the other.
template <typename T>
struct Walk {
  T* data;
  int64_t step;

  __device__ T* next() {
    T* const here = data;
    data += step;
    return here;
  }

  // The first `count` of the next ones.
  template <typename V, int LOADS, int VECTOR>
  __device__ __forceinline__ void load(Words<V, VECTOR> (&packs)[LOADS], int count) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const T* const here = next();
      if (i < count) packs[i] = load_words<VECTOR>(here);
    }
  }
};

// Sums of each column of a thread: of the deviations from its origin, a value of it or of one near,
// and of their squares.
template <int VECTOR>
struct ColumnSums {
  float origins[VECTOR];
  Sums sums[VECTOR] = {};

  template <typename T>
  __device__ __forceinline__ void start(const Words<T, VECTOR>& values) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) origins[i] = values.at(i);
  }

  template <typename T>
  __device__ __forceinline__ void add(const Words<T, VECTOR>& values) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float deviation = values.at(i) - origins[i];
      sums[i].first += deviation;
      sums[i].second += deviation * deviation;
    }
  }
};

template <int THREADS, int VECTOR>
struct ChannelTile {
  int group;        // the first one of the tile
  int groups;       // of the tile
  int group_width;  // channels that the tile has of each of them
  int channel;      // the first one of the tile
  int part;         // which part of the group the tile is
  int row_packs;    // packs of a position
  int rows;         // positions side by side
  int filled;       // shares that have positions, the first ones
  int begin;        // the first position
  int turns;        // of `rows` positions each
  int rest;         // positions beyond these
  int row;          // of this thread
  int column;       // its first channel, counted from that of the tile
  int count;        // how many positions it has, `rows` apart

  // Tile `tile` of one of `shares` shares of the positions, each (but the last) a multiple of
  // `loads` for every thread.
  __device__ ChannelTile(const ChannelTiling& tiling, const GroupNormShape& shape, int tile,
                         int share, int shares, int loads) {
    part = tile % tiling.parts;
    group = tile / tiling.parts * tiling.groups;
    groups = min(tiling.groups, shape.groups - group);
    const int skipped = part * tiling.channels;
    channel = group * shape.channels + skipped;
    group_width =
        tiling.parts > 1 ? min(tiling.channels, shape.channels - skipped) : shape.channels;
    row_packs = ceil_div(tiling.channels, VECTOR);
    rows = THREADS / row_packs;
    const int units = (shape.positions - 1) / (rows * loads) + 1;
    const int of_share = ceil_div(units, shares), span = of_share * rows * loads;
    filled = ceil_div(units, of_share);
    begin = share * span;
    const int size = max(0, min(shape.positions - begin, span));
    turns = size / rows;
    rest = size - turns * rows;
    row = int(threadIdx.x) / row_packs;
    column = int(threadIdx.x) % row_packs * VECTOR;
    count = row < rows && column < channels() ? positions(row) : 0;
  }

  __device__ int channels() const { return groups * group_width; }

  // How many positions a row of threads has.
  __device__ int positions(int row) const { return turns + (row < rest); }

  // This thread's way through a tensor.
  template <typename T>
  __device__ Walk<T> walk(T* data, const GroupStrides& strides, int batch) const {
    const int64_t first = batch * strides.batch + (begin + row) * strides.position;
    return {data + first + channel + column, opaque(rows * strides.position)};
  }

  // Calls visit(own, width, lane, lanes): so many threads have a group of the tile, the group
  // counted from that of the tile. All threads call it: beyond the last group, where the width is
  // 0, there is nothing to do but to take part in shuffles.
  template <class Visit>
  __device__ void each_group(Visit visit) const {
    int lanes = 32;
    while (lanes > 1 && lanes * groups > THREADS) lanes /= 2;
    for (int first = 0; first < groups; first += THREADS / lanes) {
      const int own = first + int(threadIdx.x) / lanes;
      visit(own, own < groups ? group_width : 0, int(threadIdx.x) % lanes, lanes);
    }
  }

  // Calls visit(i, own) for each channel of this thread.
  template <class Visit>
  __device__ void each_channel_group(Visit visit) const {
    int own = column / group_width, rest = column - own * group_width;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      visit(i, own);
      if (++rest == group_width) ++own, rest = 0;
    }
  }

  // Weight or bias of this thread's channels.
  template <typename WEIGHT>
  __device__ Words<WEIGHT, VECTOR> of_channels(const void* data) const {
    return load_words<VECTOR>(static_cast<const WEIGHT*>(data) + channel + column);
  }

  // What these channels need, from the mean and 1 / deviation of the groups of the tile.
  template <typename WEIGHT>
  __device__ Affine<VECTOR> affine(const float* stats, const Words<WEIGHT, VECTOR>& weight,
                                   const Words<WEIGHT, VECTOR>& bias,
                                   float (&scales)[VECTOR]) const {
    Affine<VECTOR> result;
    each_channel_group([&](int i, int own) {
      scales[i] = stats[2 * own + 1];
      result.mean[i] = stats[2 * own];
      result.scale[i] = scales[i] * weight.at(i);
      result.bias[i] = bias.at(i);
    });
    return result;
  }

  // Of each group, from the sums of all threads; one of them calls visit(own, moments).
  template <class Visit>
  __device__ void moments(const ColumnSums<VECTOR>& column_sums, Visit visit) const {
    __shared__ Sums columns[THREADS * VECTOR];  // mean, squares of the deviations from it
    if (count) {
      const float inverse = rcp_approx(float(count));
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const Sums sums = column_sums.sums[i];
        const float mean = sums.first * inverse;
        columns[threadIdx.x * VECTOR + i] = {column_sums.origins[i] + mean,
                                             sums.second - sums.first * mean};
      }
    }
    __syncthreads();
    each_group([&](int own, int width, int lane, int lanes) {
      const auto each_column = [&](auto add) {
        for (int row = 0; row < rows; ++row) {
          const int n = positions(row);
          const Sums* of_group = columns + row * row_packs * VECTOR + own * width;
          for (int i = lane; i < width && n; i += lanes) add(float(n), of_group[i]);
        }
      };
      const Moments moments = moments_of_parts(each_column, lanes);
      if (lane == 0 && width) visit(own, moments);
    });
  }

  // Of each channel, from the sums of the threads: channel i of the tile is columns[i] then, and
  // the thread that wrote it has called visit(i).
  template <class Visit>
  __device__ void channel_sums(const Sums (&sums)[VECTOR], Sums (&columns)[THREADS * VECTOR],
                               Visit visit) const {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) columns[threadIdx.x * VECTOR + i] = sums[i];
    __syncthreads();
    for (int i = threadIdx.x; i < channels(); i += THREADS) {
      for (int row = 1; row < rows; ++row)
        columns[i] = columns[i] + columns[row * row_packs * VECTOR + i];
      visit(i);
    }
  }
};
