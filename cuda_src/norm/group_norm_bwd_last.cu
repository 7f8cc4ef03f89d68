// group_norm_bwd with channels last: three steps (three_steps.cuh) over the samples in pieces, as
// in group_norm_fwd_last.
#include "channel_tile.cuh"
#include "three_steps.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, int LOADS, int VECTOR, int BLOCKS,
          Step STEP>
__global__ void __launch_bounds__(CHANNEL_THREADS, BLOCKS)
    group_norm_bwd_last(const __grid_constant__ GroupNormBwdParams params) {
  using Tile = ChannelTile<LOADS, VECTOR>;
  using Values = RowPacks<RowTile<1, LOADS, VECTOR>, T>;
  const GroupNormShape& shape = params.shape;
  const int turns = params.unit_blocks / params.tiling.tiles;
  const int all_channels = shape.groups * shape.channels;
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight);
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias);
  const auto load_values = [&](const Tile& tile, const void* data, const GroupStrides& strides,
                               int batch) {
    Values values;
    const T* start =
        static_cast<const T*>(data) + batch * strides.batch + tile.channel + tile.column();
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (tile.has(load))
        values.packs[load] =
            load_words<VECTOR, true>(start + tile.position(load) * strides.position);
    }
    return values;
  };

  const auto collect = [&](int batch, int piece) {
    const Tile tile(params.tiling, shape, piece);
    const Values values = load_values(tile, params.x, params.x_strides, batch);
    const Values gradients = load_values(tile, params.dout, params.dout_strides, batch);
    // ---- sums of each column of this thread ----
    __shared__ Sums columns[CHANNEL_THREADS * VECTOR];
    if (tile.active()) {
      float scales[VECTOR];
      const auto affine =
          tile.affine(params.stats + 2 * int64_t(batch) * shape.groups, weight, bias, scales);
      Sums sums[VECTOR] = {};
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        if (tile.has(load))
          add_to_sums<ACTIVATION>(values.packs[load], gradients.packs[load], affine, sums);
      }
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        columns[threadIdx.x * VECTOR + i] = {sums[i].first * scales[i], sums[i].second};
    }
    __syncthreads();
    // ---- of each channel ----
    const int64_t turn = batch * int64_t(turns) + piece / params.tiling.tiles;
    float2* const pieces = reinterpret_cast<float2*>(params.pieces) + turn * all_channels;
    for (int i = threadIdx.x; i < tile.groups * tile.group_width; i += CHANNEL_THREADS) {
      Sums sums = {0.f, 0.f};
      for (int row = 0; row < tile.rows; ++row)
        sums = sums + columns[row * tile.row_packs * VECTOR + i];
      pieces[tile.channel + i] = make_float2(sums.first, sums.second);
    }
  };

  const auto sum_up = [&](int batch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // ---- shares of dweight and dbias of this sample ----
    float* partials = params.partials + batch * int64_t(all_channels);
    const int64_t of_bias = shape.batch * all_channels;
    for (int channel = threadIdx.x; channel < all_channels; channel += CHANNEL_THREADS) {
      const float2* pieces = reinterpret_cast<const float2*>(params.pieces) +
                             batch * int64_t(turns) * all_channels + channel;
      Sums sums = {0.f, 0.f};
#pragma unroll 8
      for (int turn = 0; turn < turns; ++turn) {
        const float2 sum = *(pieces + int64_t(turn) * all_channels);
        sums = sums + Sums{sum.x, sum.y};
      }
      partials[channel] = sums.first;
      partials[of_bias + channel] = sums.second;
    }
    __syncthreads();
    // ---- means of each group ----
    for (int group = warp; group < shape.groups; group += CHANNEL_THREADS / 32) {
      Sums means = {0.f, 0.f};
      for (int i = lane; i < shape.channels; i += 32) {
        const int channel = group * shape.channels + i;
        const float w = to_float(weight[channel]);
        means = means + Sums{w * *(partials + channel), w * *(partials + of_bias + channel)};
      }
      means = sum_of_lanes(means, 32);
      if (lane > 0) continue;
      float* own = params.means + 2 * (int64_t(batch) * shape.groups + group);
      own[0] = means.first * shape.inverse_size;
      own[1] = means.second * shape.inverse_size;
    }
  };

  const auto apply = [&](int batch, int piece) {
    const Tile tile(params.tiling, shape, piece);
    const Values values = load_values(tile, params.x, params.x_strides, batch);
    const Values gradients = load_values(tile, params.dout, params.dout_strides, batch);
    if (!tile.active()) return;
    const int64_t first_group = int64_t(batch) * shape.groups;
    float scales[VECTOR];
    const auto affine = tile.affine(params.stats + 2 * first_group, weight, bias, scales);
    InputGradient constants[VECTOR];
    tile.each_channel_group([&](int i, int group) {
      const float* means = params.means + 2 * (first_group + group);
      constants[i] = input_gradient(scales[i], {*(means), *(means + 1)});
    });
    T* dx =
        static_cast<T*>(params.dx) + batch * params.dx_strides.batch + tile.channel + tile.column();
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (!tile.has(load)) continue;
      store_words<VECTOR, true>(
          dx + tile.position(load) * params.dx_strides.position,
          gradient_of<ACTIVATION>(values.packs[load], gradients.packs[load], affine, constants));
    }
  };
  run_step<STEP>(params.unit_blocks, collect, sum_up, apply);
}
