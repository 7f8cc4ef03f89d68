// Gradients of norm_fwd, for rows that fit into registers. With n = (x - mean) * scale and
// g = dout * weight:
//   dx      = scale * (g - mean of g - n * mean of g * n) + dresidual    (RMS: no mean of g)
//   dweight = sum of dout * n over the rows, dbias = sum of dout
//
// dout and x are read once. A block takes every gridDim.x-th row and keeps its share of dweight and
// dbias in registers; sum_partials adds up the shares of all blocks, always in the same order. The
// next row is on its way while this one is reduced.
#include "row_tile.cuh"

template <typename T, typename WEIGHT, bool RMS, int ROW_THREADS, int LOADS, int VECTOR>
__global__ void __launch_bounds__(block_threads(ROW_THREADS), min_blocks(ROW_THREADS, 128))
    norm_bwd(const __grid_constant__ NormBwdParams params) {
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR>;
  const NormShape& shape = params.shape;
  const T* x = static_cast<const T*>(params.x);
  const T* dout = static_cast<const T*>(params.dout);
  const T* dresidual = static_cast<const T*>(params.dresidual);
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight);
  __shared__ Sums scratch[2][MAX_WARPS];

  RowPacks<Tile, T> x_row = {}, dout_row = {};
  const auto load_row = [&](int64_t row) {
    if (row >= shape.rows) return;
    x_row.load(x + shape.at(params.x_strides, row), shape.columns);
    dout_row.load(dout + shape.at(params.dout_strides, row), shape.columns);
  };
  float dweight[LOADS][VECTOR] = {}, dbias[LOADS][VECTOR] = {};
  const int64_t step = int64_t(gridDim.x) * Tile::ROWS;
  int parity = 0;
  load_row(int64_t(blockIdx.x) * Tile::ROWS + Tile::row());
  for (int64_t first = int64_t(blockIdx.x) * Tile::ROWS; first < shape.rows; first += step) {
    // ---- read ----
    const int64_t row = first + Tile::row();
    const int columns = row < shape.rows ? shape.columns : 0;
    const RowPacks<Tile, T> x_now = x_row, dout_now = dout_row;
    load_row(row + step);
    RowPacks<Tile, T> added = {};
    if (dresidual && columns)
      added.load(dresidual + shape.at(params.dresidual_strides, row), columns);
    const float mean = columns && !RMS ? params.stats[2 * row] : 0.f;
    const float scale = columns ? params.stats[2 * row + 1] : 0.f;

    // ---- sums ----
    float normal[LOADS][VECTOR], g[LOADS][VECTOR];
    Sums sums = {0.f, 0.f};
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const int column = Tile::column(load);
      const bool inside = column < columns;
      Pack<WEIGHT, VECTOR> weights = {};
      if (inside) weights = load_pack<VECTOR>(weight + column);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float gradient = inside ? dout_now.at(load, i) : 0.f;
        normal[load][i] = inside ? (x_now.at(load, i) - mean) * scale : 0.f;
        g[load][i] = gradient * to_float(weights.values[i]);
        sums.first += g[load][i];
        sums.second += g[load][i] * normal[load][i];
        dweight[load][i] += gradient * normal[load][i];
        dbias[load][i] += gradient;
      }
    }
    sums = group_sum<ROW_THREADS>(sums, scratch[parity]);
    parity ^= 1;  // so that no warp overwrites what another still reads: one barrier a row

    // ---- dx ----
    const float mean_g = RMS ? 0.f : sums.first * shape.inverse_columns;
    const float mean_gn = sums.second * shape.inverse_columns;
    RowPacks<Tile, T> dx;
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float centred = g[load][i] - mean_g - normal[load][i] * mean_gn;
        dx.packs[load].values[i] = from_float<T>(scale * centred + added.at(load, i));
      }
    }
    if (columns) dx.store(static_cast<T*>(params.dx) + shape.at(params.dx_strides, row), columns);
  }

  // ---- this block's share of dweight and dbias ----
  // Rows side by side in a block add up in shared memory, one after the other.
  constexpr int SHARED = Tile::ROWS > 1 ? Tile::COLUMNS : 1;
  __shared__ float total[2][SHARED];
  for (int turn = 0; turn < Tile::ROWS; ++turn) {
    if (Tile::row() == turn) {
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          const int column = Tile::column(load) + i;
          float share = dweight[load][i], bias_share = dbias[load][i];
          if (Tile::ROWS > 1) {
            share = total[0][column] = turn ? total[0][column] + share : share;
            bias_share = total[1][column] = turn ? total[1][column] + bias_share : bias_share;
          }
          if (turn == Tile::ROWS - 1 && column < shape.columns) {
            float* partials = params.partials + int64_t(blockIdx.x) * shape.columns + column;
            partials[0] = share;
            if (params.has_bias) partials[params.splits * shape.columns] = bias_share;
          }
        }
      }
    }
    if (Tile::ROWS > 1) __syncthreads();
  }
}
