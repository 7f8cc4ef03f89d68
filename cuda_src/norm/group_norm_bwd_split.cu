// group_norm_bwd for groups that do not fit into registers: three steps (three_steps.cuh) over its
// segments, each a part of one channel that a warp has in registers.
#include "group_tile.cuh"
#include "three_steps.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

template <typename T, typename WEIGHT, Activation ACTIVATION, int LOADS, int VECTOR, int BLOCKS,
          Step STEP>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    group_norm_bwd_split(const __grid_constant__ GroupNormBwdParams params) {
  using Tile = RowTile<32, LOADS, VECTOR>;
  const GroupNormShape& shape = params.shape;
  const int segments = ceil_div(shape.positions, Tile::COLUMNS);  // of a channel
  const int records = params.unit_blocks * WARPS;                 // of a unit, one for each warp
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight);
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias);

  // Calls visit(record, batch, channel, begin, columns); there are 0 columns beyond the last
  // segment.
  const auto with_segment = [&](int unit, int piece, auto visit) {
    const int record = piece * WARPS + fresh_thread_index() / 32;
    const int channel = record / segments, begin = (record - channel * segments) * Tile::COLUMNS;
    const int batch = unit / shape.groups;
    const int columns = channel < shape.channels ? min(shape.positions - begin, Tile::COLUMNS) : 0;
    visit(record, batch, (unit - batch * shape.groups) * shape.channels + channel, begin, columns);
  };
  const auto load_segment = [&](const void* data, const GroupStrides& strides, int batch,
                                int channel, int begin, int columns) {
    RowPacks<Tile, T> values;
    values.load(
        static_cast<const T*>(data) + batch * strides.batch + channel * strides.channel + begin,
        columns);
    return values;
  };

  const auto collect = [&](int unit, int piece) {
    with_segment(unit, piece, [&](int record, int batch, int channel, int begin, int columns) {
      if (columns == 0) return;
      const auto values = load_segment(params.x, params.x_strides, batch, channel, begin, columns);
      const auto gradients =
          load_segment(params.dout, params.dout_strides, batch, channel, begin, columns);
      const auto affine = affine_of<1>(weight + channel, bias + channel, params.stats[2 * unit],
                                       params.stats[2 * unit + 1]);
      Sums sums[1] = {};
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        if (Tile::column(load) < columns)
          add_to_sums<ACTIVATION>(values.packs[load], gradients.packs[load], affine, sums);
      }
      sums[0] = sum_of_lanes(sums[0], 32);
      if (threadIdx.x % 32 == 0)
        reinterpret_cast<Sums*>(params.pieces)[int64_t(unit) * records + record] = sums[0];
    });
  };
  const auto sum_up = [&](int unit) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int batch = unit / shape.groups, group = unit - batch * shape.groups;
    const int64_t all_channels = int64_t(shape.groups) * shape.channels;
    const float scale = params.stats[2 * unit + 1];
    Sums means = {0.f, 0.f};
    for (int i = warp; i < shape.channels; i += WARPS) {
      Sums sums = {0.f, 0.f};
      for (int segment = lane; segment < segments; segment += 32) {
        const float* sum = params.pieces + 2 * (int64_t(unit) * records + i * segments + segment);
        sums = sums + Sums{*(sum), *(sum + 1)};
      }
      sums = sum_of_lanes(sums, 32);
      sums.first *= scale;
      const int channel = group * shape.channels + i;
      float* partials = params.partials + batch * all_channels + channel;
      if (lane == 0) partials[0] = sums.first;
      if (lane == 0) partials[shape.batch * all_channels] = sums.second;
      const float w = lane == 0 ? to_float(weight[channel]) : 0.f;
      means = means + Sums{w * sums.first, w * sums.second};
    }
    __shared__ Sums scratch[MAX_WARPS];
    means = group_sum<THREADS>(means, scratch);
    if (threadIdx.x > 0) return;
    params.means[2 * unit] = means.first * shape.inverse_size;
    params.means[2 * unit + 1] = means.second * shape.inverse_size;
  };
  const auto apply = [&](int unit, int piece) {
    with_segment(unit, piece, [&](int, int batch, int channel, int begin, int columns) {
      const auto values = load_segment(params.x, params.x_strides, batch, channel, begin, columns);
      auto gradients =
          load_segment(params.dout, params.dout_strides, batch, channel, begin, columns);
      if (columns == 0) return;
      const float scale = params.stats[2 * unit + 1];
      const auto affine =
          affine_of<1>(weight + channel, bias + channel, params.stats[2 * unit], scale);
      const float* means = params.means + 2 * unit;
      const InputGradient constants[] = {input_gradient(scale, {*(means), *(means + 1)})};
      T* dx = static_cast<T*>(params.dx) + batch * params.dx_strides.batch +
              channel * params.dx_strides.channel + begin;
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        const int column = Tile::column(load);
        if (column >= columns) continue;
        store_words<VECTOR, true>(
            dx + column,
            gradient_of<ACTIVATION>(values.packs[load], gradients.packs[load], affine, constants));
      }
    });
  };
  run_step<STEP>(params.unit_blocks, collect, sum_up, apply);
}
