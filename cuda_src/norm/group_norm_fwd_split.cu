// group_norm_fwd for groups that do not fit into registers: three steps (three_steps.cuh) over its
// segments, each a part of one channel that a warp has in registers.
#include "group_tile.cuh"
#include "three_steps.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

template <typename T, typename WEIGHT, Activation ACTIVATION, int LOADS, int VECTOR, int BLOCKS,
          Step STEP>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    group_norm_fwd_split(const __grid_constant__ GroupNormFwdParams params) {
  using Tile = RowTile<32, LOADS, VECTOR>;
  const GroupNormShape& shape = params.shape;
  const int segments = ceil_div(shape.positions, Tile::COLUMNS);  // of a channel
  const int records = params.unit_blocks * WARPS;                 // of a unit, one for each warp
  Moments* const partials = reinterpret_cast<Moments*>(params.partials);

  // Calls visit(record, batch, channel, begin, columns); there are 0 columns beyond the last
  // segment.
  const auto with_segment = [&](int unit, int piece, auto visit) {
    const int record = piece * WARPS + fresh_thread_index() / 32;
    const int channel = record / segments, begin = (record - channel * segments) * Tile::COLUMNS;
    const int batch = unit / shape.groups;
    const int columns = channel < shape.channels ? min(shape.positions - begin, Tile::COLUMNS) : 0;
    visit(record, batch, (unit - batch * shape.groups) * shape.channels + channel, begin, columns);
  };
  const auto load_segment = [&](int batch, int channel, int begin, int columns) {
    RowPacks<Tile, T> values;
    values.load(static_cast<const T*>(params.x) + batch * params.x_strides.batch +
                    channel * params.x_strides.channel + begin,
                columns);
    return values;
  };

  const auto collect = [&](int unit, int piece) {
    with_segment(unit, piece, [&](int record, int batch, int channel, int begin, int columns) {
      auto values = load_segment(batch, channel, begin, columns);
      __shared__ float means[MAX_WARPS];
      __shared__ Sums scratch[MAX_WARPS];
      const float inverse = columns ? rcp_approx(float(columns)) : 0.f;
      const Moments moments = values.row_moments(columns, inverse, means, scratch);
      if (threadIdx.x % 32 == 0) partials[int64_t(unit) * records + record] = moments;
    });
  };
  const auto sum_up = [&](int unit) {
    Moments moments = {0.f, 0.f, 0.f};
    for (int i = threadIdx.x; i < records; i += THREADS) {
      const float* partial = params.partials + 3 * (int64_t(unit) * records + i);
      moments = moments + Moments{*(partial), *(partial + 1), *(partial + 2)};
    }
    __shared__ Moments scratch[MAX_WARPS];
    moments = group_sum<THREADS>(moments, scratch);
    if (threadIdx.x > 0) return;
    params.stats[2 * unit] = moments.mean;
    params.stats[2 * unit + 1] = rsqrtf(moments.m2 * shape.inverse_size + shape.eps);
  };
  const auto apply = [&](int unit, int piece) {
    with_segment(unit, piece, [&](int, int batch, int channel, int begin, int columns) {
      const auto values = load_segment(batch, channel, begin, columns);
      if (columns == 0) return;
      const auto affine = affine_of<1>(static_cast<const WEIGHT*>(params.weight) + channel,
                                       static_cast<const WEIGHT*>(params.bias) + channel,
                                       *(params.stats + 2 * unit), *(params.stats + 2 * unit + 1));
      T* out = static_cast<T*>(params.out) + batch * params.out_strides.batch +
               channel * params.out_strides.channel + begin;
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        const int column = Tile::column(load);
        if (column >= columns) continue;
        store_words<VECTOR, true>(out + column, activated<ACTIVATION>(values.packs[load], affine));
      }
    });
  };
  run_step<STEP>(params.unit_blocks, collect, sum_up, apply);
}
