// GroupNorm and activation of groups that no block or cluster can hold, NCHW or NHWC: three steps
// over their positions (position_tiles.cuh), which read x twice. It is the kernel of everything in
// NHWC.
#include "position_tiles.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, bool NHWC, int LOADS, int VECTOR,
          int BLOCKS, Step STEP>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    group_norm_fwd_steps(const __grid_constant__ GroupNormFwdParams params) {
  using Tile = PositionTile<NHWC, LOADS, VECTOR>;
  const GroupNormShape& shape = params.shape;
  Moments* const partials = reinterpret_cast<Moments*>(params.partials);

  if constexpr (STEP == gather) {
    // ---- mean and variance of a group from all of its records ----
    const int64_t group = group_of_gatherer<Tile>();
    if (group >= shape.batch * shape.groups) return;
    const int records = Tile::records(params.tiling);
    Moments moments = {0.f, 0.f, 0.f};
    for (int i = threadIdx.x % Tile::GATHERERS; i < records; i += Tile::GATHERERS)
      moments = moments + partials[group * records + i];
    __shared__ Moments scratch[MAX_WARPS];
    moments = group_sum<Tile::GATHERERS>(moments, scratch);
    if (threadIdx.x % Tile::GATHERERS == 0)
      reinterpret_cast<float2*>(params.stats)[group] =
          make_float2(moments.mean, inverse_deviation(moments, shape));
    return;
  }

  // The first packs are on their way while the block reads what it needs to know of their channels.
  const Tile tile = tile_of_block<Tile, STEP>(shape, params.tiling);
  auto x = tile.walk(static_cast<const T*>(params.x), params.x_strides);
  Words<T, VECTOR> values[LOADS] = {};
  const auto load = [&](int count) { x.load(values, count); };
  load(tile.count);
  if constexpr (STEP == collect) {
    // ---- moments of the groups of a piece ----
    DeviationSums<Tile::CHANNELS> sums;
    tile.start(sums, values[0]);
    each_pack<Tile>(tile.count, load, [&](int i) { sums.add(values[i]); });
    tile.moments(sums, [&](int64_t record, Moments moments) { partials[record] = moments; });
  } else {
    // ---- normalise, activate, write ----
    if (tile.count == 0) return;
    const auto affine =
        affine_of_tile<ACTIVATION, T, WEIGHT>(tile, params.stats, params.weight, params.bias);
    auto out = tile.walk(static_cast<T*>(params.out), params.out_strides);
    each_pack<Tile>(tile.count, load, [&](int i) {
      store_words<VECTOR, true>(out.next(), activated(values[i], affine));
    });
  }
}
