// Gradients of GroupNorm for groups that no block or cluster can hold, NCHW or NHWC: three steps
// over their positions (position_tiles.cuh), which read x and dout twice. sum_partials adds up the
// gradients of weight and bias over the samples.
#include "position_tiles.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, bool NHWC, int LOADS, int VECTOR,
          int BLOCKS, Step STEP>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    group_norm_bwd_steps(const __grid_constant__ GroupNormBwdParams params) {
  using Tile = PositionTile<NHWC, LOADS, VECTOR>;
  constexpr int CHANNELS = Tile::CHANNELS;
  constexpr bool CENTRED = Affine<ACTIVATION, T, 1>::CENTRED;
  const GroupNormShape& shape = params.shape;
  Sums* const pieces = reinterpret_cast<Sums*>(params.pieces);

  if constexpr (STEP == gather) {
    // ---- dweight and dbias of the channels of a group of one sample, and what its dx needs ----
    const int64_t group = group_of_gatherer<Tile>();
    if (group >= shape.batch * shape.groups) return;
    const int64_t batch = group / shape.groups,
                  all_channels = int64_t(shape.groups) * shape.channels;
    const int first = int(group - batch * shape.groups) * shape.channels;
    const ChannelRecords records = Tile::channel_records(shape, params.tiling, group);
    const float2 stats = reinterpret_cast<const float2*>(params.stats)[group];
    // Lanes side by side have channels where these lie side by side, and beyond them records.
    const int lanes = Tile::GATHERERS > 32 ? 1 : lanes_for(shape.channels);
    const int lane = threadIdx.x % lanes, offset = threadIdx.x % 32 / lanes;
    const int warp = threadIdx.x % Tile::GATHERERS / 32;
    Sums means = {0.f, 0.f};
    for (int begin = warp * lanes; begin < shape.channels; begin += Tile::GATHERERS / 32 * lanes) {
      const int channel = begin + lane;
      Sums sums = {0.f, 0.f};
      if (channel < shape.channels) {
        const Sums* of_channel = pieces + records.first + channel * records.of_channel;
#pragma unroll 4
        for (int i = offset; i < records.count; i += 32 / lanes)
          sums = sums + of_channel[i * records.of_piece];
      }
      for (int mask = lanes; mask < 32; mask *= 2) sums = sums + shuffle_xor(sums, mask);
      if (offset > 0 || channel >= shape.channels) continue;
      sums = channel_sums<CENTRED>(sums, stats.x, stats.y);
      float* const partials = params.partials + batch * all_channels + first + channel;
      partials[0] = sums.first;
      partials[shape.batch * all_channels] = sums.second;
      const float w = to_float(static_cast<const WEIGHT*>(params.weight)[first + channel]);
      means = means + Sums{w * sums.first, w * sums.second};
    }
    __shared__ Sums scratch[MAX_WARPS];
    means = group_sum<Tile::GATHERERS>(means, scratch);
    const float share = stats.y * shape.inverse_size;
    if (threadIdx.x % Tile::GATHERERS == 0)
      reinterpret_cast<float2*>(params.means)[group] =
          make_float2(share * means.first, share * means.second);
    return;
  }

  // The first packs are on their way while the block reads what it needs to know of their channels.
  const Tile tile = tile_of_block<Tile, STEP>(shape, params.tiling);
  auto x = tile.walk(static_cast<const T*>(params.x), params.x_strides);
  auto dout = tile.walk(static_cast<const T*>(params.dout), params.dout_strides);
  Words<T, VECTOR> values[LOADS], gradients[LOADS];
  const auto load = [&](int count) {
    x.load(values, count);
    dout.load(gradients, count);
  };
  load(tile.count);
  Affine<ACTIVATION, T, CHANNELS> affine = {};
  if (tile.count)
    affine = affine_of_tile<ACTIVATION, T, WEIGHT>(tile, params.stats, params.weight, params.bias);
  Sums sums[CHANNELS] = {};
  if constexpr (STEP == collect) {
    // ---- sums of each channel of a piece ----
    each_pack<Tile>(tile.count, load, [&](int i) {
      float dz[VECTOR];
      add_gradients(values[i], gradients[i], affine, dz, sums);
    });
    tile.channel_sums(sums, [&](int64_t record, Sums sum) { pieces[record] = sum; });
  } else {
    // ---- dx ----
    if (tile.count == 0) return;
    InputGradient of_channels[CHANNELS];
    float2 stats[CHANNELS];
    tile.each_channel(params.stats, [&](int c, float2 own) { stats[c] = own; });
    tile.each_channel(params.means, [&](int c, float2 own) {
      of_channels[c] = InputGradient::of<CENTRED>(stats[c].x, stats[c].y, {own.x, own.y});
    });
    auto dx = tile.walk(static_cast<T*>(params.dx), params.out_strides);
    each_pack<Tile>(tile.count, load, [&](int i) {
      float result[VECTOR];
      add_gradients(values[i], gradients[i], affine, result, sums);
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        const int c = k / (VECTOR / CHANNELS);
        result[k] = of_channels[c].dx(values[i].at(k), result[k], c, affine);
      }
      store_words<VECTOR, true>(dx.next(), round_words<T>(result));
    });
  }
}
