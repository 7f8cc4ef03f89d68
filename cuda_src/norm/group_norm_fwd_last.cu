// group_norm_fwd with channels last: three steps (three_steps.cuh) over the samples in pieces, each
// some positions of all channels, or of as many as a block can have side by side. The slice that
// one group has of a position is too short to be read alone.
#include "channel_tile.cuh"
#include "three_steps.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, int LOADS, int VECTOR, int BLOCKS,
          Step STEP>
__global__ void __launch_bounds__(CHANNEL_THREADS, BLOCKS)
    group_norm_fwd_last(const __grid_constant__ GroupNormFwdParams params) {
  using Tile = ChannelTile<LOADS, VECTOR>;
  using Values = RowPacks<RowTile<1, LOADS, VECTOR>, T>;
  const GroupNormShape& shape = params.shape;
  const int turns = params.unit_blocks / params.tiling.tiles;
  const int records = turns * params.tiling.parts;  // of a group
  Moments* const partials = reinterpret_cast<Moments*>(params.partials);
  const auto load_values = [&](const Tile& tile, int batch) {
    Values values;
    const T* x = static_cast<const T*>(params.x) + batch * params.x_strides.batch + tile.channel +
                 tile.column();
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (tile.has(load))
        values.packs[load] =
            load_words<VECTOR, true>(x + tile.position(load) * params.x_strides.position);
    }
    return values;
  };

  const auto collect = [&](int batch, int piece) {
    const Tile tile(params.tiling, shape, piece);
    Values values = load_values(tile, batch);
    // ---- mean of each column of this thread, and squares of the deviations from it ----
    const int count = tile.active() ? tile.count(tile.row()) : 0;
    const float share = count ? rcp_approx(float(count)) : 0.f;
    float means[VECTOR] = {}, squares[VECTOR] = {};
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (load >= count) continue;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) means[i] += values.at(load, i);
    }
    values.keep_packed();
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) means[i] *= share;
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (load >= count) continue;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float deviation = values.at(load, i) - means[i];
        squares[i] += deviation * deviation;
      }
    }
    __shared__ Sums columns[CHANNEL_THREADS * VECTOR];
    if (tile.active()) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) columns[threadIdx.x * VECTOR + i] = {means[i], squares[i]};
    }
    __syncthreads();

    // ---- of each group: the mean of the means, and deviations from that ----
    tile.each_group([&](int group, int lane, int lanes) {
      const int begin = group * tile.group_width,
                width = group < tile.groups ? tile.group_width : 0;
      const auto each_column = [&](auto visit) {
        for (int row = 0; row < tile.rows; ++row) {
          const Sums* of_row = columns + row * tile.row_packs * VECTOR + begin;
          for (int i = lane; i < width; i += lanes) visit(float(tile.count(row)), of_row[i]);
        }
      };
      Sums sums = {0.f, 0.f};
      each_column([&](float n, Sums column) { sums = sums + Sums{n, n * column.first}; });
      sums = sum_of_lanes(sums, lanes);
      const float mean = sums.first > 0.f ? sums.second * rcp_approx(sums.first) : 0.f;
      Sums rest = {0.f, 0.f};
      each_column([&](float n, Sums column) {
        const float deviation = column.first - mean;
        rest = rest + Sums{n * deviation, column.second + n * deviation * deviation};
      });
      rest = sum_of_lanes(rest, lanes);
      if (lane > 0 || width == 0) return;
      const float inverse = sums.first > 0.f ? rcp_approx(sums.first) : 0.f;
      const int64_t own = int64_t(batch) * shape.groups + tile.group + group;
      partials[own * records + tile.part * turns + piece / params.tiling.tiles] =
          moments_of(sums.first, inverse, mean, rest);
    });
  };

  const auto sum_up = [&](int batch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int group = warp; group < shape.groups; group += CHANNEL_THREADS / 32) {
      const int64_t own = int64_t(batch) * shape.groups + group;
      Moments moments = {0.f, 0.f, 0.f};
      for (int i = lane; i < records; i += 32) {
        const float* partial = params.partials + 3 * (own * records + i);
        moments = moments + Moments{*(partial), *(partial + 1), *(partial + 2)};
      }
      __shared__ Moments scratch[MAX_WARPS];
      moments = group_sum<32>(moments, scratch);
      if (lane > 0) continue;
      params.stats[2 * own] = moments.mean;
      params.stats[2 * own + 1] = rsqrtf(moments.m2 * shape.inverse_size + shape.eps);
    }
  };

  const auto apply = [&](int batch, int piece) {
    const Tile tile(params.tiling, shape, piece);
    const Values values = load_values(tile, batch);
    if (!tile.active()) return;
    float scales[VECTOR];
    const auto affine = tile.affine(params.stats + 2 * int64_t(batch) * shape.groups,
                                    static_cast<const WEIGHT*>(params.weight),
                                    static_cast<const WEIGHT*>(params.bias), scales);
    T* out = static_cast<T*>(params.out) + batch * params.out_strides.batch + tile.channel +
             tile.column();
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (!tile.has(load)) continue;
      store_words<VECTOR, true>(out + tile.position(load) * params.out_strides.position,
                                activated<ACTIVATION>(values.packs[load], affine));
    }
  };
  run_step<STEP>(params.unit_blocks, collect, sum_up, apply);
}
