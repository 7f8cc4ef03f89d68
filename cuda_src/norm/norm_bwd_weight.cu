// Partial sums of dweight and dbias for rows that do not fit into registers, beside norm_bwd_long.
// A thread has VECTOR columns and adds up every splits-th row of them; sum_partials adds up the
// partial sums. No shared memory, and nothing is waited for.
#include "row_tile.cuh"

// Rows in one chain of additions, because a chain over thousands of rows would lose a digit.
constexpr int CHAIN = 64;

template <typename T, bool RMS, int VECTOR>
__global__ void __launch_bounds__(MIN_BLOCK_THREADS)
    norm_bwd_weight(const __grid_constant__ NormBwdParams params) {
  const NormShape& shape = params.shape;
  const int64_t split = blockIdx.x % params.splits;
  const int column = int(blockIdx.x / params.splits * MIN_BLOCK_THREADS + threadIdx.x) * VECTOR;
  if (column >= shape.columns) return;
  float dweight[VECTOR] = {}, dbias[VECTOR] = {};
#pragma unroll 1
  for (int64_t row = split; row < shape.rows;) {
    float some_dweight[VECTOR] = {}, some_dbias[VECTOR] = {};
    const int64_t end = min(shape.rows, row + CHAIN * params.splits);
#pragma unroll 2
    for (; row < end; row += params.splits) {
      const T* x = static_cast<const T*>(params.x) + shape.at(params.x_strides, row);
      const T* dout = static_cast<const T*>(params.dout) + shape.at(params.dout_strides, row);
      const auto x_pack = load_words<VECTOR>(x + column);
      const auto dout_pack = load_words<VECTOR>(dout + column);
      const float mean = RMS ? 0.f : params.stats[2 * row];
      const float scale = params.stats[2 * row + 1];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float gradient = dout_pack.at(i);
        some_dweight[i] += gradient * ((x_pack.at(i) - mean) * scale);
        some_dbias[i] += gradient;
      }
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) dweight[i] += some_dweight[i], dbias[i] += some_dbias[i];
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    float* partials = params.partials + split * shape.columns + column + i;
    partials[0] = dweight[i];
    if (params.dbias) partials[params.splits * shape.columns] = dbias[i];
  }
}
