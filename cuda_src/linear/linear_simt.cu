// A projection of any number of rows without tensor cores, for float32 on all GPUs and for the
// dtypes that the tensor cores of an older GPU lack:
//
//   out = epilogue(x weight^T)    LinearParams has the arrays, epilogue.cuh what follows the
//   product
//
// A block of 128 threads computes 64 x 64 of out; simt_tile.cuh has the map of its threads. With a
// gate it multiplies twice and keeps both sums. Shared memory holds slices of x and of weights,
// which multiply_transposed fills and reads between barriers of its own.
#include "../attention/simt_gemm.cuh"
#include "epilogue.cuh"

constexpr int ROWS = 8;  // of a thread
constexpr int BLOCK = 64;
constexpr int SPAN = 64;  // of the depth, which makes one sum

template <typename T>
__device__ __forceinline__ Matrix<const T> rows_of(const void* data, int64_t stride, int64_t first,
                                                   int64_t rows, int columns) {
  return {static_cast<const T*>(data) + first * stride, stride,
          int(min(rows - first, int64_t(BLOCK))), columns};
}

// sums = a b^T. Each SPAN of the depth has a sum of its own: one chain of float32 additions over
// the whole depth would lose a digit.
template <typename T>
__device__ __forceinline__ void multiply_rows(float (&sums)[ROWS][4],
                                              SimtStorage<ROWS, BLOCK>& smem,
                                              const Matrix<const T>& a, const Matrix<const T>& b) {
#pragma unroll
  for (int i = 0; i < ROWS * 4; ++i) sums[i / 4][i % 4] = 0.f;
#pragma unroll 1
  for (int k = 0; k < a.columns; k += SPAN) {
    const int span = min(SPAN, a.columns - k);
    float part[ROWS][4];
    multiply_transposed<ROWS, BLOCK>(part, smem,
                                     Matrix<const T>{a.data + k, a.row_stride, a.rows, span},
                                     Matrix<const T>{b.data + k, b.row_stride, b.rows, span});
#pragma unroll
    for (int i = 0; i < ROWS * 4; ++i) sums[i / 4][i % 4] += part[i / 4][i % 4];
  }
}

template <typename T, Activation ACTIVATION, bool GATED>
__global__ void __launch_bounds__(SIMT_THREADS)
    linear_simt(const __grid_constant__ LinearParams params) {
  __shared__ SimtStorage<ROWS, BLOCK> smem;
  const int column_blocks = ceil_div(params.columns, BLOCK);
  const int64_t first_row = int64_t(blockIdx.x / column_blocks) * BLOCK;
  const int first_column = blockIdx.x % column_blocks * BLOCK;

  // ---- products ----
  const auto x = rows_of<T>(params.x, params.x_stride, first_row, params.rows, params.depth);
  float sums[ROWS][4], gates[GATED ? ROWS : 1][4];
  multiply_rows<T>(
      sums, smem, x,
      rows_of<T>(params.weight, params.weight_stride, first_column, params.columns, params.depth));
  if constexpr (GATED) {
    multiply_rows<T>(gates, smem, x,
                     rows_of<T>(params.gate_weight, params.gate_stride, first_column,
                                params.columns, params.depth));
  }

  // ---- out ----
#pragma unroll
  for (int e = 0; e < ROWS; ++e) {
    const int64_t row = first_row + thread_y() + row_offset<ROWS>(e);
    if (row >= params.rows) continue;
    T* out = static_cast<T*>(params.out) + row * params.out_stride;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = first_column + thread_x() + column_offset(j);
      if (column >= params.columns) continue;
      const float gate = GATED ? gates[GATED ? e : 0][j] : 0.f;
      const float value = activated<T, ACTIVATION, GATED>(params, column, sums[e][j], gate);
      out[column] = from_float<T>(value + residual_at<T>(params, row, column));
    }
  }
}
