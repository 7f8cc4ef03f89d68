// dx of LayerNorm and RMSNorm for rows that do not fit into registers. A block has one row and
// reads it twice in pieces: for the two sums, then for dx. Shared memory holds one partial sum a
// warp; all threads reach the barriers of that sum. norm_bwd_weight computes dweight and dbias.
#include "row_tile.cuh"

template <typename T, typename WEIGHT, bool RMS, int NUM_THREADS, int LOADS, int VECTOR>
__global__ void __launch_bounds__(NUM_THREADS)
    norm_bwd_long(const __grid_constant__ NormBwdParams params) {
  using Tile = RowTile<NUM_THREADS, LOADS, VECTOR>;
  static_assert(Tile::ROWS == 1, "a block has one row");
  const NormShape& shape = params.shape;
  const int64_t row = blockIdx.x;
  const int columns = shape.columns;
  const T* x = static_cast<const T*>(params.x) + shape.at(params.x_strides, row);
  const T* dout = static_cast<const T*>(params.dout) + shape.at(params.dout_strides, row);
  const T* dresidual = static_cast<const T*>(params.dresidual);
  if (dresidual) dresidual += shape.at(params.dresidual_strides, row);
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight);
  T* dx = static_cast<T*>(params.dx) + shape.at(params.dx_strides, row);
  const float mean = RMS ? 0.f : params.stats[2 * row];
  const float scale = params.stats[2 * row + 1];

  // Calls visit(column, g, n) for each pack of this thread; g and n have VECTOR values.
  const auto each_pack = [&](auto visit) {
    for (int begin = 0; begin < columns; begin += Tile::COLUMNS) {
      RowPacks<Tile, T> x_row, dout_row;
      x_row.load(x + begin, columns - begin);
      dout_row.load(dout + begin, columns - begin);
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        const int column = begin + Tile::column(load);
        if (column >= columns) continue;
        const auto weights = load_words<VECTOR>(weight + column);
        float g[VECTOR], normal[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          g[i] = dout_row.at(load, i) * weights.at(i);
          normal[i] = (x_row.at(load, i) - mean) * scale;
        }
        visit(column, g, normal);
      }
    }
  };

  Sums sums = {0.f, 0.f};
  each_pack([&](int, const float (&g)[VECTOR], const float (&normal)[VECTOR]) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      sums.first += g[i];
      sums.second += g[i] * normal[i];
    }
  });
  __shared__ Sums scratch[MAX_WARPS];
  sums = group_sum<NUM_THREADS>(sums, scratch);
  const float mean_g = RMS ? 0.f : sums.first * shape.inverse_columns;
  const float mean_gn = sums.second * shape.inverse_columns;

  each_pack([&](int column, const float (&g)[VECTOR], const float (&normal)[VECTOR]) {
    Words<T, VECTOR> added = {};
    float result[VECTOR];
    if (dresidual) added = load_words<VECTOR>(dresidual + column);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float centred = g[i] - mean_g - normal[i] * mean_gn;
      result[i] = scale * centred + added.at(i);
    }
    store_words<VECTOR>(dx + column, round_words<T>(result));
  });
}
