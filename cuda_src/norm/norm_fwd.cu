// LayerNorm (or RMSNorm) of x, or of h = x + residual, which it writes too:
//   out = (h - mean) / sqrt(variance + eps) * weight + bias
//   out = h / sqrt(mean of squares + eps) * weight              (RMS)
//
// ROW_THREADS threads have a row in registers: x and residual are read once, h and out written
// once. Of a row that is longer than all their registers the statistics are merged piece by piece,
// and each piece is read again. h is normalised as it was rounded, which is what the backward reads
// and what separate operations compute.
#include "row_tile.cuh"

// Of a thread; what is enough not to spill.
constexpr int registers(int row_threads, int loads, int vector) {
  return vector > 1 && loads > 2 ? 128 : row_threads > 256 ? 64 : 80;
}

template <typename T, typename WEIGHT, bool RMS, int ROW_THREADS, int LOADS, int VECTOR>
__global__ void __launch_bounds__(block_threads(ROW_THREADS),
                                  min_blocks(ROW_THREADS, registers(ROW_THREADS, LOADS, VECTOR)))
    norm_fwd(const __grid_constant__ NormFwdParams params) {
  // ---- which row ----
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR>;
  const NormShape& shape = params.shape;
  const int64_t row = int64_t(blockIdx.x) * Tile::ROWS + Tile::row();
  const int columns = row < shape.rows ? shape.columns : 0;  // 0: takes part in shuffles only
  const T* x = static_cast<const T*>(params.x) + shape.at(params.x_strides, row);
  T* out = static_cast<T*>(params.out) + shape.at(params.out_strides, row);
  const T* residual = static_cast<const T*>(params.residual);
  T* h = static_cast<T*>(params.residual_out);
  if (residual) {
    residual += shape.at(params.residual_strides, row);
    h += shape.at(params.residual_out_strides, row);
  }

  // ---- read, add the residual, statistics ----
  RowPacks<Tile, T> values;
  Moments moments = {0.f, 0.f, 0.f};
  float squares = 0.f;
#pragma unroll 1
  for (int begin = 0; begin < columns; begin += Tile::COLUMNS) {
    const int rest = columns - begin;
    values.load(x + begin, rest);
    if (residual) {
      RowPacks<Tile, T> added;
      added.load(residual + begin, rest);
#pragma unroll
      for (int load = 0; load < LOADS; ++load) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
          values.packs[load].values[i] = from_float<T>(values.at(load, i) + added.at(load, i));
      }
      values.store(h + begin, rest);
    }
    if constexpr (RMS) {
      squares += values.sum_of_squares(rest);
    } else {
      moments = begin ? moments + values.moments(rest) : values.moments(rest);
    }
  }
  float mean = 0.f;
  if constexpr (RMS) {
    __shared__ Sums scratch[MAX_WARPS];
    squares = group_sum<ROW_THREADS>(Sums{squares, 0.f}, scratch).first;
  } else {
    __shared__ Moments scratch[MAX_WARPS];
    moments = group_sum<ROW_THREADS>(moments, scratch);
    mean = moments.mean, squares = moments.m2;
  }
  const float scale = rsqrtf(squares * shape.inverse_columns + shape.eps);
  if (params.stats && columns && threadIdx.x % ROW_THREADS == 0) {
    params.stats[2 * row] = mean;
    params.stats[2 * row + 1] = scale;
  }

  // ---- normalise ----
#pragma unroll 1
  for (int begin = 0; begin < columns; begin += Tile::COLUMNS) {
    const int rest = columns - begin;
    if (columns > Tile::COLUMNS) values.load((residual ? h : x) + begin, rest);
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const int column = Tile::column(load);
      if (column >= rest) continue;
      const auto weights =
          load_pack<VECTOR>(static_cast<const WEIGHT*>(params.weight) + begin + column);
      Pack<WEIGHT, VECTOR> biases = {};
      if (params.bias)
        biases = load_pack<VECTOR>(static_cast<const WEIGHT*>(params.bias) + begin + column);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float normal = (values.at(load, i) - mean) * scale;
        values.packs[load].values[i] =
            from_float<T>(normal * to_float(weights.values[i]) + to_float(biases.values[i]));
      }
    }
    values.store(out + begin, rest);
  }
}
