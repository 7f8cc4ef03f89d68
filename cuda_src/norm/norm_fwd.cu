// LayerNorm (or RMSNorm) of x, or of h = x + residual, which it writes too:
//   out = (h - mean) / sqrt(variance + eps) * weight + bias
//   out = h / sqrt(mean of squares + eps) * weight              (RMS)
//
// ROW_THREADS threads have a row in registers: x and residual are read once, h and out written
// once. A block takes every gridDim.x-th row; the next one is on its way while this one is reduced.
// h is normalised as it was rounded, which is what the backward reads and what separate operations
// compute.
#include "row_tile.cuh"

template <typename T, typename WEIGHT, bool RMS, int ROW_THREADS, int LOADS, int VECTOR, int BLOCKS>
__global__ void __launch_bounds__(block_threads(ROW_THREADS), BLOCKS)
    norm_fwd(const __grid_constant__ NormFwdParams params) {
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR>;
  constexpr bool AHEAD = ROW_THREADS < 1024;  // of more threads the registers are full
  const NormShape& shape = params.shape;
  const T* x = static_cast<const T*>(params.x);
  const T* residual = static_cast<const T*>(params.residual);
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight);
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias);
  __shared__ float means[2][MAX_WARPS];
  __shared__ Sums scratch[MAX_WARPS];

  RowPacks<Tile, T> next, added;
  const auto load_row = [&](int64_t row) {
    if (row >= shape.rows) return;
    next.load(x + shape.at(params.x_strides, row), shape.columns);
    if (residual) added.load(residual + shape.at(params.residual_strides, row), shape.columns);
  };
  const int64_t step = int64_t(gridDim.x) * Tile::ROWS;
  int parity = 0;
  if (AHEAD) load_row(int64_t(blockIdx.x) * Tile::ROWS + Tile::row());
#pragma unroll 1
  for (int64_t first = int64_t(blockIdx.x) * Tile::ROWS; first < shape.rows; first += step) {
    // ---- read, add the residual ----
    const int64_t row = first + Tile::row();
    const int columns = row < shape.rows ? shape.columns : 0;  // 0: takes part in shuffles only
    RowPacks<Tile, T> now;
    if constexpr (AHEAD) {
      now = next;
    } else {
      now.load(x + shape.at(params.x_strides, row), columns);
    }
    if (residual && columns) {
      const T* other = residual + shape.at(params.residual_strides, row);
      T* h = static_cast<T*>(params.residual_out) + shape.at(params.residual_out_strides, row);
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
        const int column = Tile::column(load);
        if (column >= columns) continue;
        now.add(load, AHEAD ? added.packs[load] : load_words<VECTOR, true>(other + column));
        if (!AHEAD) store_words<VECTOR>(h + column, now.packs[load]);
      }
      if (AHEAD) {
        load_row(row + step);
        now.store(h, columns);
      }
    } else if (AHEAD) {
      load_row(row + step);
    }

    // ---- statistics ----
    float mean = 0.f, squares;
    if constexpr (RMS) {
      squares = group_sum<ROW_THREADS>(now.sum_of_squares(columns), means[parity]);
      parity ^= 1;  // so that no warp overwrites what another still reads: one barrier a row
    } else {
      const Moments moments = now.row_moments(columns, shape.inverse_columns, means[0], scratch);
      mean = moments.mean, squares = moments.m2;
    }
    const float scale = rsqrtf(squares * shape.inverse_columns + shape.eps);
    if (params.stats && columns && threadIdx.x % ROW_THREADS == 0) {
      params.stats[2 * row] = mean;
      params.stats[2 * row + 1] = scale;
    }

    // ---- normalise ----
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const int column = Tile::column(load);
      if (column >= columns) continue;
      const auto weights = load_words<VECTOR>(weight + column);
      Words<WEIGHT, VECTOR> biases = {};
      if (bias) biases = load_words<VECTOR>(bias + column);
      float out[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float normal = (now.at(load, i) - mean) * scale;
        out[i] = normal * weights.at(i) + biases.at(i);
      }
      now.packs[load] = round_words<T>(out);
    }
    if (columns) {
      now.store(static_cast<T*>(params.out) + shape.at(params.out_strides, row), columns);
    }
  }
}
