// Three steps for groups that no block can hold, NCHW or NHWC, in three launches of one kernel:
// collect reads x (and dout) and writes partial sums, gather makes of them what a group needs, and
// apply reads again, the last pieces first, as they lie in the L2 cache still.
//
// The blocks of `collect` and `apply` take a unit (a group in NCHW, a sample in NHWC) in pieces. A
// thread keeps to the channels of one pack: one channel in NCHW, neighbouring channels in NHWC; and
// it walks along the positions, LOADS packs at a time.
#pragma once
#include "affine.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

enum Step { collect, gather, apply };

// The packs of a thread in one tensor.
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

// The places of the partial sums of the channels of a group. Channel c has `count` of them,
// from first + c * of_channel on, of_piece apart.
struct ChannelRecords {
  int64_t first, of_channel, of_piece;
  int count;
};

// NCHW: each warp of a block has a segment of one channel of a group.
template <int LOADS_, int VECTOR>
struct NchwTile {
  static constexpr int LOADS = LOADS_;
  static constexpr int CHANNELS = 1;         // of a thread
  static constexpr int GATHERERS = THREADS;  // threads that gather for a group
  static constexpr bool ONE_LOAD = true;     // a thread has no more than LOADS packs
  static constexpr int PITCH = 32 * VECTOR, SEGMENT = LOADS * PITCH;
  int64_t first_group;  // its number among the groups of all samples
  int64_t record;       // of this warp: [batch, groups, records]
  int batch, channel, begin;
  int columns;  // of this warp
  int count;    // packs of this thread

  static __device__ int records(const StepTiling& tiling) { return tiling.blocks * WARPS; }

  static __device__ ChannelRecords channel_records(const GroupNormShape& shape,
                                                   const StepTiling& tiling, int64_t group) {
    const int segments = ceil_div(shape.positions, SEGMENT);
    return {group * records(tiling), segments, 1, segments};
  }

  __device__ NchwTile(const GroupNormShape& shape, const StepTiling& tiling, int unit, int piece)
      : first_group(unit), batch(unit / shape.groups) {
    const int of_group = piece * WARPS + fresh_thread_index() / 32;
    const int segments = ceil_div(shape.positions, SEGMENT);
    channel = of_group / segments, begin = (of_group - channel * segments) * SEGMENT;
    columns = channel < shape.channels ? min(shape.positions - begin, SEGMENT) : 0;
    begin += fresh_thread_index() % 32 * VECTOR;
    count = max(0, ceil_div(columns - fresh_thread_index() % 32 * VECTOR, PITCH));
    channel += (unit - batch * shape.groups) * shape.channels;
    record = first_group * records(tiling) + of_group;
  }

  __device__ int first_column() const { return 0; }  // of this thread, counted from `channel`

  template <typename T>
  __device__ Walk<T> walk(T* data, const GroupStrides& strides) const {
    return {opaque(data + batch * strides.batch + channel * strides.channel + begin), PITCH};
  }

  // `values` are two numbers of each group: calls visit(channel of this thread, those of its
  // group).
  template <class Visit>
  __device__ void each_channel(const float* values, Visit visit) const {
    visit(0, reinterpret_cast<const float2*>(values)[first_group]);
  }

  // The origin of the warp's sums is the mean of its first packs.
  template <typename T>
  __device__ __forceinline__ void start(DeviationSums<1>& sums,
                                        const Words<T, VECTOR>& first) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum += first.at(i);
    sum = sum_of_neighbours<32>(count ? sum : 0.f);
    sums.origins[0] = sum * rcp_approx(float(max(1, min(columns, PITCH))));
  }

  // One thread calls visit(record, moments of its warp).
  template <class Visit>
  __device__ void moments(const DeviationSums<1>& sums, Visit visit) const {
    const Sums of_warp = sum_of_neighbours<32>(sums.sums[0]);
    const float share = rcp_approx(float(max(1, columns)));
    if (threadIdx.x % 32 == 0)
      visit(record, moments_of(float(columns), share, sums.origins[0], of_warp));
  }

  // Calls visit() with the sums of the channel.
  template <class Visit>
  __device__ void channel_sums(const Sums (&sums)[1], Visit visit) const {
    const Sums own = sum_of_lanes(sums[0], 32);
    if (threadIdx.x % 32 == 0) visit(record, own);
  }
};

// NHWC: a block has a share of the positions, and of each the channels side by side in its tile,
// `rows` positions at a time.
template <int LOADS_, int VECTOR>
struct NhwcTile {
  static constexpr int LOADS = LOADS_;
  static constexpr int CHANNELS = VECTOR;  // of a thread
  static constexpr int GATHERERS = 32;     // threads that gather for a group
  static constexpr bool ONE_LOAD = false;
  int64_t first_group;     // of the tile, among the groups of all samples
  int64_t record;          // of that group: [batch, groups, parts, shares]
  int64_t channel_record;  // of the first channel: [batch, shares, channels]
  int record_pitch;        // between two groups
  int batch, begin;        // the first position
  int groups;              // of the tile
  int width;               // channels that the tile has of each of them
  int channel;             // the first one of the tile
  int row_packs;           // packs of a position
  int rows;                // positions side by side
  int full_rows, rest;     // rows of positions, and positions beyond these
  int row, column;         // of this thread, counted from `begin` and `channel`
  int count;               // its positions, `rows` apart

  static __device__ int records(const StepTiling& tiling) {
    return tiling.blocks / tiling.tiles * tiling.parts;
  }

  static __device__ ChannelRecords channel_records(const GroupNormShape& shape,
                                                   const StepTiling& tiling, int64_t group) {
    const int all = shape.groups * shape.channels, shares = tiling.blocks / tiling.tiles;
    const int64_t batch = group / shape.groups;
    const int64_t first = batch * shares * all + (group - batch * shape.groups) * shape.channels;
    return {first, 1, all, shares};
  }

  // Each share of the positions (but the last) is a multiple of LOADS for every thread.
  __device__ NhwcTile(const GroupNormShape& shape, const StepTiling& tiling, int unit, int piece)
      : batch(unit) {
    const int shares = tiling.blocks / tiling.tiles, share = piece / tiling.tiles;
    const int tile = piece - share * tiling.tiles, part = tile % tiling.parts;
    const int group = tile / tiling.parts * tiling.groups, skipped = part * tiling.channels;
    groups = min(tiling.groups, shape.groups - group);
    channel = group * shape.channels + skipped;
    width = tiling.parts > 1 ? min(tiling.channels, shape.channels - skipped) : shape.channels;
    row_packs = ceil_div(tiling.channels, VECTOR);
    rows = THREADS / row_packs;
    const int units = (shape.positions - 1) / (rows * LOADS) + 1;
    const int span = ceil_div(units, shares) * rows * LOADS;
    begin = share * span;
    const int size = max(0, min(shape.positions - begin, span));
    full_rows = size / rows;
    rest = size - full_rows * rows;
    row = int(threadIdx.x) / row_packs;
    column = int(threadIdx.x) % row_packs * VECTOR;
    count = row < rows && column < groups * width ? positions(row) : 0;
    first_group = int64_t(batch) * shape.groups + group;
    record_pitch = records(tiling);
    record = first_group * record_pitch + part * shares + share;
    channel_record = (int64_t(batch) * shares + share) * (shape.groups * shape.channels) + channel;
  }

  __device__ int first_column() const { return column; }

  // How many positions a row of threads has.
  __device__ int positions(int row) const { return full_rows + (row < rest); }

  template <typename T>
  __device__ Walk<T> walk(T* data, const GroupStrides& strides) const {
    const int64_t first = batch * strides.batch + (begin + row) * strides.position;
    return {data + first + channel + column, opaque(rows * strides.position)};
  }

  // `values` are two numbers of each group: calls visit(channel of this thread, those of its
  // group).
  template <class Visit>
  __device__ void each_channel(const float* values, Visit visit) const {
    const float2* of_group = reinterpret_cast<const float2*>(values) + first_group + column / width;
    int left = column % width;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      visit(i, *of_group);
      if (++left == width) ++of_group, left = 0;
    }
  }

  template <typename T>
  __device__ __forceinline__ void start(DeviationSums<VECTOR>& sums,
                                        const Words<T, VECTOR>& first) const {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sums.origins[i] = first.at(i);
  }

  // Calls visit(record, moments) of each group of the tile, by one thread each.
  template <class Visit>
  __device__ void moments(const DeviationSums<VECTOR>& sums, Visit visit) const {
    __shared__ Sums columns[THREADS * VECTOR];  // mean, squares of the deviations from it
#pragma unroll
    for (int i = 0; count && i < VECTOR; ++i) {
      const Moments own = sums.moments(i, float(count));
      columns[threadIdx.x * VECTOR + i] = {own.mean, own.m2};
    }
    __syncthreads();
    int lanes = 32;  // that a group has
    while (lanes > 1 && lanes * groups > THREADS) lanes /= 2;
    const int lane = int(threadIdx.x) % lanes;
    for (int first = 0; first < groups; first += THREADS / lanes) {
      // All threads take part in shuffles, with a width of 0 beyond the last group.
      const int own = first + int(threadIdx.x) / lanes, own_width = own < groups ? width : 0;
      const auto each_column = [&](auto add) {
        for (int row = 0; row < rows; ++row) {
          const int n = positions(row);
          const Sums* of_group = columns + row * row_packs * VECTOR + own * width;
          for (int i = lane; i < own_width && n; i += lanes) add(float(n), of_group[i]);
        }
      };
      const Moments moments = moments_of_parts(each_column, lanes);
      if (lane == 0 && own_width) visit(record + own * record_pitch, moments);
    }
  }

  // Calls visit(record, sums) of each channel of the tile, by one thread each.
  template <class Visit>
  __device__ void channel_sums(const Sums (&sums)[VECTOR], Visit visit) const {
    __shared__ Sums columns[THREADS * VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) columns[threadIdx.x * VECTOR + i] = sums[i];
    __syncthreads();
    for (int i = threadIdx.x; i < groups * width; i += THREADS) {
      Sums sum = columns[i];
      for (int row = 1; row < rows; ++row) sum = sum + columns[row * row_packs * VECTOR + i];
      visit(channel_record + i, sum);
    }
  }
};

template <bool NHWC, int LOADS, int VECTOR>
using PositionTile = typename Choose<NHWC, NhwcTile<LOADS, VECTOR>, NchwTile<LOADS, VECTOR>>::Type;

// The piece of this block; `apply` begins with the last one.
template <class Tile, Step STEP>
__device__ __forceinline__ Tile tile_of_block(const GroupNormShape& shape,
                                              const StepTiling& tiling) {
  const unsigned block = STEP == collect ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  const int unit = block / unsigned(tiling.blocks);
  return Tile(shape, tiling, unit, block - unsigned(unit) * tiling.blocks);
}

// Calls visit(i) for all packs of a thread, the first LOADS of which are in registers as pack i;
// load(count) reads the next ones, if there are more.
template <class Tile, class Load, class Visit>
__device__ __forceinline__ void each_pack(int count, Load load, Visit visit) {
  while (count > 0) {
#pragma unroll
    for (int i = 0; i < Tile::LOADS; ++i) {
      if (i >= count) break;
      visit(i);
    }
    count = Tile::ONE_LOAD ? 0 : count - Tile::LOADS;
    if (!Tile::ONE_LOAD) load(count);
  }
}

// The group for which this thread gathers, among those of all samples.
template <class Tile>
__device__ __forceinline__ int64_t group_of_gatherer() {
  return (int64_t(blockIdx.x) * THREADS + threadIdx.x) / Tile::GATHERERS;
}

// Factors of the channels of a thread.
template <Activation ACTIVATION, typename T, typename WEIGHT, class Tile>
__device__ __forceinline__ Affine<ACTIVATION, T, Tile::CHANNELS> affine_of_tile(const Tile& tile,
                                                                                const float* stats,
                                                                                const void* weight,
                                                                                const void* bias) {
  constexpr int CHANNELS = Tile::CHANNELS;
  const int channel = tile.channel + tile.first_column();
  const auto w = load_words<CHANNELS>(static_cast<const WEIGHT*>(weight) + channel);
  const auto b = load_words<CHANNELS>(static_cast<const WEIGHT*>(bias) + channel);
  Affine<ACTIVATION, T, CHANNELS> affine;
  tile.each_channel(stats,
                    [&](int c, float2 own) { affine.set(c, own.x, own.y, w.at(c), b.at(c)); });
  return affine;
}
