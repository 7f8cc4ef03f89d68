// group_norm_fwd with channels last: three steps (three_steps.cuh) over the samples in pieces, each
// some positions of all channels, or of as many as a block can have side by side. The slice that
// one group has of a position is too short to be read alone.
#include "channel_tile.cuh"
#include "three_steps.cuh"

constexpr int THREADS = 256;

template <typename T, typename WEIGHT, Activation ACTIVATION, int LOADS, int VECTOR, int BLOCKS,
          Step STEP>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    group_norm_fwd_last(const __grid_constant__ GroupNormFwdParams params) {
  using Tile = ChannelTile<THREADS, VECTOR>;
  const GroupNormShape& shape = params.shape;
  const T* x = static_cast<const T*>(params.x);
  const int tiles = params.tiling.tiles;
  const int shares = params.unit_blocks / tiles;
  const int records = shares * params.tiling.parts;  // of a group

  // ---- moments of each group of a piece ----
  const auto collect = [&](int batch, int piece) {
    const int share = piece / tiles;
    const Tile tile(params.tiling, shape, piece - share * tiles, share, shares, LOADS);
    auto data = tile.walk(x, params.x_strides, batch);
    ColumnSums<VECTOR> sums;
    if (tile.count) sums.start(load_words<VECTOR>(data.data));
    for (int count = tile.count; count > 0; count -= LOADS) {
      Words<T, VECTOR> values[LOADS];
      data.load(values, count);
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        if (load < count) sums.add(values[load]);
      }
    }
    tile.moments(sums, [&](int own, Moments moments) {
      const int64_t group = int64_t(batch) * shape.groups + tile.group + own;
      reinterpret_cast<Moments*>(params.partials)[group * records + tile.part * shares + share] =
          moments;
    });
  };

  // ---- statistics of the groups, a warp for each ----
  const auto sum_up = [&](int block) {
    const int64_t group = int64_t(block) * (THREADS / 32) + threadIdx.x / 32;
    if (group >= shape.batch * shape.groups) return;
    Moments moments = {0.f, 0.f, 0.f};
    for (int i = threadIdx.x % 32; i < records; i += 32) {
      const float* partial = params.partials + 3 * (group * records + i);
      moments = moments + Moments{*(partial), *(partial + 1), *(partial + 2)};
    }
    __shared__ Moments scratch[MAX_WARPS];
    moments = group_sum<32>(moments, scratch);
    if (threadIdx.x % 32 > 0) return;
    params.stats[2 * group] = moments.mean;
    params.stats[2 * group + 1] = rsqrtf(moments.m2 * shape.inverse_size + shape.eps);
  };

  const auto apply = [&](int batch, int piece) {
    const int share = piece / tiles;
    const Tile tile(params.tiling, shape, piece - share * tiles, share, shares, LOADS);
    if (tile.count == 0) return;
    float scales[VECTOR];
    const auto affine = tile.affine(params.stats + 2 * (int64_t(batch) * shape.groups + tile.group),
                                    tile.template of_channels<WEIGHT>(params.weight),
                                    tile.template of_channels<WEIGHT>(params.bias), scales);
    auto data = tile.walk(x, params.x_strides, batch);
    auto out = tile.walk(static_cast<T*>(params.out), params.out_strides, batch);
    for (int count = tile.count; count > 0; count -= LOADS) {
      Words<T, VECTOR> values[LOADS];
      data.load(values, count);
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        if (load >= count) break;
        store_words<VECTOR, true>(out.next(), activated<ACTIVATION>(values[load], affine));
      }
    }
  };
  run_step<STEP>(params.unit_blocks, collect, sum_up, apply);
}
