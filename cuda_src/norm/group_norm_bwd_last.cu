// group_norm_bwd with channels last: three steps (three_steps.cuh) over the samples in pieces, as
// in group_norm_fwd_last.
#include "channel_tile.cuh"
#include "three_steps.cuh"

constexpr int THREADS = 256;

template <typename T, typename WEIGHT, Activation ACTIVATION, int LOADS, int VECTOR, int BLOCKS,
          Step STEP>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    group_norm_bwd_last(const __grid_constant__ GroupNormBwdParams params) {
  using Tile = ChannelTile<THREADS, VECTOR>;
  using Values = Words<T, VECTOR>[LOADS];
  const GroupNormShape& shape = params.shape;
  const int tiles = params.tiling.tiles;
  const int shares = params.unit_blocks / tiles;
  const int all_channels = shape.groups * shape.channels;
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight);
  const auto affine_from = [&](const Tile& tile, const float* stats, float (&scales)[VECTOR]) {
    return tile.affine(stats, tile.template of_channels<WEIGHT>(params.weight),
                       tile.template of_channels<WEIGHT>(params.bias), scales);
  };
  // Calls visit(values, gradients, count) for LOADS positions at a time.
  const auto walk = [&](const Tile& tile, int batch, auto visit) {
    auto x = tile.walk(static_cast<const T*>(params.x), params.x_strides, batch);
    auto dout = tile.walk(static_cast<const T*>(params.dout), params.dout_strides, batch);
    for (int count = tile.count; count > 0; count -= LOADS) {
      Values values, gradients;
      x.load(values, count);
      dout.load(gradients, count);
      visit(values, gradients, count);
    }
  };

  // ---- sums of each channel of a piece ----
  const auto collect = [&](int batch, int piece) {
    const int share = piece / tiles;
    const Tile tile(params.tiling, shape, piece - share * tiles, share, shares, LOADS);
    Sums sums[VECTOR] = {};
    if (tile.count) {
      float scales[VECTOR];
      const auto affine = affine_from(
          tile, params.stats + 2 * (int64_t(batch) * shape.groups + tile.group), scales);
      walk(tile, batch, [&](const Values& values, const Values& gradients, int count) {
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
          if (load < count) add_to_sums<ACTIVATION>(values[load], gradients[load], affine, sums);
        }
      });
    }
    const int64_t turn = batch * int64_t(shares) + share;
    float2* const pieces = reinterpret_cast<float2*>(params.pieces) + turn * all_channels;
    __shared__ Sums columns[THREADS * VECTOR];
    tile.channel_sums(sums, columns, [&](int i) {
      pieces[tile.channel + i] = make_float2(columns[i].first, columns[i].second);
    });
  };

  // ---- shares of dweight and dbias of the samples, and means: a warp for each group ----
  const auto sum_up = [&](int block) {
    const int64_t own = int64_t(block) * (THREADS / 32) + threadIdx.x / 32;
    if (own >= shape.batch * shape.groups) return;
    const int64_t batch = own / shape.groups;
    const int first = int(own - batch * shape.groups) * shape.channels;
    const float deviation = params.stats[2 * own + 1];  // 1 / it
    const float2* pieces =
        reinterpret_cast<const float2*>(params.pieces) + batch * shares * all_channels + first;
    float* partials = params.partials + batch * all_channels + first;
    // Lanes side by side have channels, and beyond them pieces.
    const int lanes = lanes_for(shape.channels);
    const int lane = threadIdx.x % lanes, turn = threadIdx.x % 32 / lanes;
    Sums means = {0.f, 0.f};
    for (int begin = 0; begin < shape.channels; begin += lanes) {
      const int channel = begin + lane;
      Sums sums = {0.f, 0.f};
      if (channel < shape.channels) {
#pragma unroll 4
        for (int i = turn; i < shares; i += 32 / lanes) {
          const float2 sum = *(pieces + int64_t(i) * all_channels + channel);
          sums = sums + Sums{sum.x, sum.y};
        }
      }
      for (int mask = lanes; mask < 32; mask *= 2) sums = sums + shuffle_xor(sums, mask);
      if (turn > 0 || channel >= shape.channels) continue;
      sums.first *= deviation;
      partials[channel] = sums.first;
      partials[shape.batch * all_channels + channel] = sums.second;
      const float w = to_float(weight[first + channel]);
      means = means + Sums{w * sums.first, w * sums.second};
    }
    means = sum_of_lanes(means, lanes);
    if (threadIdx.x % 32 > 0) return;
    params.means[2 * own] = means.first * shape.inverse_size;
    params.means[2 * own + 1] = means.second * shape.inverse_size;
  };

  const auto apply = [&](int batch, int piece) {
    const int share = piece / tiles;
    const Tile tile(params.tiling, shape, piece - share * tiles, share, shares, LOADS);
    if (tile.count == 0) return;
    const int64_t first_group = int64_t(batch) * shape.groups + tile.group;
    float scales[VECTOR];
    const auto affine = affine_from(tile, params.stats + 2 * first_group, scales);
    InputGradient constants[VECTOR];
    tile.each_channel_group([&](int i, int own) {
      const float* means = params.means + 2 * (first_group + own);
      constants[i] = input_gradient(scales[i], {*(means), *(means + 1)});
    });
    auto dx = tile.walk(static_cast<T*>(params.dx), params.dx_strides, batch);
    walk(tile, batch, [&](const Values& values, const Values& gradients, int count) {
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        if (load >= count) break;
        store_words<VECTOR, true>(
            dx.next(), gradient_of<ACTIVATION>(values[load], gradients[load], affine, constants));
      }
    });
  };
  run_step<STEP>(params.unit_blocks, collect, sum_up, apply);
}
