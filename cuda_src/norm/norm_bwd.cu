// Gradients of norm_fwd, for rows that fit into registers. With n = (x - mean) * scale and
// g = dout * weight:
//   dx      = scale * (g - mean of g - n * mean of g * n) + dresidual    (RMS: no mean of g)
//   dweight = sum of dout * n over the rows, dbias = sum of dout
//
// dout and x are read once. A block takes every gridDim.x-th row and keeps its share of dweight and
// dbias in registers; sum_partials adds up the shares of all blocks, always in the same order. The
// next row is on its way while this one is reduced.
#include "row_tile.cuh"

template <typename T, typename WEIGHT, bool RMS, int ROW_THREADS, int LOADS, int VECTOR, int BLOCKS>
__global__ void __launch_bounds__(block_threads(ROW_THREADS), BLOCKS)
    norm_bwd(const __grid_constant__ NormBwdParams params) {
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR>;
  const NormShape& shape = params.shape;
  const T* x = static_cast<const T*>(params.x);
  const T* dout = static_cast<const T*>(params.dout);
  const T* dresidual = static_cast<const T*>(params.dresidual);
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight);
  __shared__ Sums scratch[2][MAX_WARPS];

  // The next row, with its statistics and what is added to its gradient.
  RowPacks<Tile, T> x_row, dout_row, added_row = {};
  float mean_row = 0.f, scale_row = 0.f;
  const auto load_row = [&](int64_t row) {
    if (row >= shape.rows) return;
    if (!RMS) mean_row = params.stats[2 * row];
    scale_row = params.stats[2 * row + 1];
    x_row.load(x + shape.at(params.x_strides, row), shape.columns);
    dout_row.load(dout + shape.at(params.dout_strides, row), shape.columns);
    if (dresidual)
      added_row.load(dresidual + shape.at(params.dresidual_strides, row), shape.columns);
  };
  float dweight[LOADS][VECTOR] = {}, dbias[LOADS][VECTOR] = {};
  const int64_t step = int64_t(gridDim.x) * Tile::ROWS;
  int parity = 0;
  load_row(int64_t(blockIdx.x) * Tile::ROWS + Tile::row());
#pragma unroll 1
  for (int64_t first = int64_t(blockIdx.x) * Tile::ROWS; first < shape.rows; first += step) {
    const int64_t row = first + Tile::row();
    const int columns = row < shape.rows ? shape.columns : 0;
    RowPacks<Tile, T> x_now = x_row, dout_now = dout_row, added = added_row;
    const float mean = mean_row, scale = scale_row;
    load_row(row + step);

    // ---- sums ----
    Sums sums = {0.f, 0.f};
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const int column = Tile::column(load);
      if (column >= columns) continue;
      const auto weights = load_words<VECTOR>(weight + column);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float gradient = dout_now.at(load, i), normal = (x_now.at(load, i) - mean) * scale;
        const float g = gradient * weights.at(i);
        sums.first += g;
        sums.second += g * normal;
        dweight[load][i] += gradient * normal;
        dbias[load][i] += gradient;
      }
    }
    // Cheaper computed again than kept.
    x_now.keep_packed();
    dout_now.keep_packed();
    sums = group_sum<ROW_THREADS>(sums, scratch[parity]);
    parity ^= 1;  // so that no warp overwrites what another still reads: one barrier a row

    // ---- dx ----
    const float mean_g = RMS ? 0.f : sums.first * shape.inverse_columns;
    const float mean_gn = sums.second * shape.inverse_columns;
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const int column = Tile::column(load);
      if (column >= columns) continue;
      const auto weights = load_words<VECTOR>(weight + column);
      float dx[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float g = dout_now.at(load, i) * weights.at(i);
        const float normal = (x_now.at(load, i) - mean) * scale;
        dx[i] = scale * (g - mean_g - normal * mean_gn) + added.at(load, i);
      }
      added.packs[load] = round_words<T>(dx);
    }
    if (columns)
      added.store(static_cast<T*>(params.dx) + shape.at(params.dx_strides, row), columns);
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
