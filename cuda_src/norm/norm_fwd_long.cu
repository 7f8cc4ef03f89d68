// The forward of LayerNorm and RMSNorm for rows that do not fit into registers. A block has one row
// and goes through it twice in pieces of Tile::COLUMNS columns: first it adds the residual, writes
// h and merges the moments of the pieces, then it reads each piece of h (or of x) again, normalises
// and writes it. Each thread reads in the second pass what it wrote itself in the first. Shared
// memory holds one partial sum a warp; all threads reach the barriers of that sum.
#include "row_tile.cuh"

template <typename T, typename WEIGHT, bool RMS, int NUM_THREADS, int LOADS, int VECTOR>
__global__ void __launch_bounds__(NUM_THREADS, 1)
    norm_fwd_long(const __grid_constant__ NormFwdParams params) {
  using Tile = RowTile<NUM_THREADS, LOADS, VECTOR>;
  static_assert(Tile::ROWS == 1, "a block has one row");
  const NormShape& shape = params.shape;
  const int64_t row = blockIdx.x;
  const int columns = shape.columns;
  const T* x = static_cast<const T*>(params.x) + shape.at(params.x_strides, row);
  T* out = static_cast<T*>(params.out) + shape.at(params.out_strides, row);
  const T* residual = static_cast<const T*>(params.residual);
  T* h = static_cast<T*>(params.residual_out);
  if (residual) {
    residual += shape.at(params.residual_strides, row);
    h += shape.at(params.out_strides, row);
  }

  // ---- read, add the residual, statistics ----
  RowPacks<Tile, T> values;
  Moments moments = {0.f, 0.f, 0.f};
#pragma unroll 1
  for (int begin = 0; begin < columns; begin += Tile::COLUMNS) {
    const int rest = columns - begin;
    values.load(x + begin, rest);
    if (residual) {
      RowPacks<Tile, T> added;
      added.load(residual + begin, rest);
#pragma unroll
      for (int load = 0; load < LOADS; ++load) values.add(load, added.packs[load]);
      values.store(h + begin, rest);
    }
    if constexpr (RMS) {
      moments.m2 += values.sum_of_squares(rest);
    } else {
      moments = moments + values.moments(rest);
    }
  }
  if constexpr (RMS) {
    __shared__ float scratch[MAX_WARPS];
    moments.m2 = group_sum<NUM_THREADS>(moments.m2, scratch);
  } else {
    __shared__ Moments scratch[MAX_WARPS];
    moments = group_sum<NUM_THREADS>(moments, scratch);
  }
  const float scale = rsqrtf(moments.m2 * shape.inverse_columns + shape.eps);
  if (params.stats && threadIdx.x == 0) {
    params.stats[2 * row] = moments.mean;
    params.stats[2 * row + 1] = scale;
  }

  // ---- normalise ----
#pragma unroll 1
  for (int begin = 0; begin < columns; begin += Tile::COLUMNS) {
    const int rest = columns - begin;
    values.load((residual ? h : x) + begin, rest);
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const int column = Tile::column(load);
      if (column >= rest) continue;
      const auto weights =
          load_words<VECTOR>(static_cast<const WEIGHT*>(params.weight) + begin + column);
      Words<WEIGHT, VECTOR> biases = {};
      if (params.bias)
        biases = load_words<VECTOR>(static_cast<const WEIGHT*>(params.bias) + begin + column);
      float result[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float normal = (values.at(load, i) - moments.mean) * scale;
        result[i] = normal * weights.at(i) + biases.at(i);
      }
      store_words<VECTOR>(out + begin + column, round_words<T>(result));
    }
  }
}
