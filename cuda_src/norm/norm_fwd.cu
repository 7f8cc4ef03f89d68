// LayerNorm (or RMSNorm) of x, or of h = x + residual, which it writes too:
//   out = (h - mean) / sqrt(variance + eps) * weight + bias
//   out = h / sqrt(mean of squares + eps) * weight              (RMS)
//
// ROW_THREADS threads have a row in registers: x and residual are read once, h and out written
// once. h is normalised as it was rounded, which is what the backward reads and what separate
// operations compute. Blocks that take several rows, the next one on its way, were no faster: other
// blocks of the multiprocessor keep the memory busy as well.
#include "row_tile.cuh"

template <typename T, typename WEIGHT, bool RMS, int ROW_THREADS, int LOADS, int VECTOR, int BLOCKS>
__global__ void __launch_bounds__(block_threads(ROW_THREADS), BLOCKS)
    norm_fwd(const __grid_constant__ NormFwdParams params) {
  // ---- which row ----
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR>;
  const NormShape& shape = params.shape;
  const int64_t row = int64_t(blockIdx.x) * Tile::ROWS + Tile::row();
  const int columns = row < shape.rows ? shape.columns : 0;  // 0: takes part in shuffles only

  // ---- read, add the residual ----
  RowPacks<Tile, T> values;
  values.load(static_cast<const T*>(params.x) + shape.at(params.x_strides, row), columns);
  if (params.residual && columns) {
    RowPacks<Tile, T> added;  // all of it on its way before the first addition
    added.load(static_cast<const T*>(params.residual) + shape.at(params.residual_strides, row),
               columns);
#pragma unroll
    for (int load = 0; load < LOADS; ++load) values.add(load, added.packs[load]);
    values.store(static_cast<T*>(params.residual_out) + shape.at(params.residual_out_strides, row),
                 columns);
  }

  // ---- statistics ----
  __shared__ float means[MAX_WARPS];
  __shared__ Sums scratch[MAX_WARPS];
  float mean = 0.f, squares;
  if constexpr (RMS) {
    squares = group_sum<ROW_THREADS>(values.sum_of_squares(columns), means);
  } else {
    const Moments moments = values.row_moments(columns, shape.inverse_columns, means, scratch);
    mean = moments.mean, squares = moments.m2;
  }
  const float scale = rsqrtf(squares * shape.inverse_columns + shape.eps);
  if (params.stats && columns && threadIdx.x % ROW_THREADS == 0) {
    params.stats[2 * row] = mean;
    params.stats[2 * row + 1] = scale;
  }

  // ---- normalise ----
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight) + Tile::column(0);
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias) + Tile::column(0);
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {  // without branches, so that the loads go first
    const bool inside = Tile::column(load) < columns;
    Words<WEIGHT, VECTOR> weights = {}, biases = {};
    if (inside) weights = load_words<VECTOR>(weight + load * Tile::PITCH);
    if (inside && params.bias) biases = load_words<VECTOR>(bias + load * Tile::PITCH);
    float out[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float normal = (values.at(load, i) - mean) * scale;
      out[i] = normal * weights.at(i) + biases.at(i);
    }
    values.packs[load] = round_words<T>(out);
  }
  if (columns) {
    values.store(static_cast<T*>(params.out) + shape.at(params.out_strides, row), columns);
  }
}
