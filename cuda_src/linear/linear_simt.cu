// A projection of any number of rows without tensor cores, for float32 on all GPUs and for the
// dtypes that the tensor cores of an older GPU lack:
//
//   out = epilogue(x weight^T)    LinearParams has the arrays, epilogue.cuh what follows the
//   product
//
// A block of 128 threads computes 64 x 64 of out; attention/simt/tile.cuh has the map of its
// threads. With a gate it multiplies twice and keeps both sums. Shared memory holds slices of x and
// of weights; multiply_add() has the barriers.
#include "../attention/simt/gemm.cuh"
#include "epilogue.cuh"

constexpr int BLOCK = 64;
constexpr int SPAN = 64;  // of the depth, which makes one sum
using Map = TileMap<BLOCK, BLOCK>;
constexpr int ROWS = Map::ROWS;
constexpr int COLS = Map::COLS;

template <typename T>
__device__ __forceinline__ Matrix<const T> rows_of(const void* data, int64_t stride, int64_t first,
                                                   int64_t rows, int columns) {
  const T* from = static_cast<const T*>(data) + first * stride;
  const int64_t all = reinterpret_cast<int64_t>(from) | stride * int64_t(sizeof(T));
  const bool vectors = all % int64_t(4 * sizeof(T)) == 0 && columns % 4 == 0;
  return {from, stride, int(min(rows - first, int64_t(BLOCK))), columns, vectors};
}

// sums = a b^T. Each SPAN of the depth has a sum of its own: one chain of float32 additions over
// the whole depth would lose a digit.
template <typename T>
__device__ __forceinline__ void multiply_rows(float (&sums)[ROWS][COLS],
                                              OperandBuffers<BLOCK, BLOCK>& buffers,
                                              const Matrix<const T>& a, const Matrix<const T>& b) {
  const auto copies_from = [&](int k) {
    return Copies{ColumnsOf<BLOCK, T>(a.from_column(k)), ColumnsOf<BLOCK, T>(b.from_column(k))};
  };
  set_zero(sums);
  __syncthreads();  // no thread reads the operands of an earlier product any more
  copy_first_chunk(buffers, copies_from(0));
#pragma unroll 1
  for (int k = 0; k < a.columns; k += SPAN) {
    float part[ROWS][COLS];
    set_zero(part);
    // The first chunk after the last span is all zeros.
    multiply_add(part, staged<BLOCK>(buffers.a, Map::row()), staged<BLOCK>(buffers.b, Map::col()),
                 chunks_of(min(SPAN, a.columns - k)), buffers, copies_from(k),
                 [&] { return copies_from(k + SPAN); });
    add(sums, part);
  }
}

template <typename T, Activation ACTIVATION, bool GATED>
__global__ void __launch_bounds__(SIMT_THREADS, 3)
    linear_simt(const __grid_constant__ LinearParams params) {
  __shared__ OperandBuffers<BLOCK, BLOCK> buffers;
  const int column_blocks = ceil_div(params.columns, BLOCK);
  const int64_t first_row = int64_t(blockIdx.x / column_blocks) * BLOCK;
  const int first_column = blockIdx.x % column_blocks * BLOCK;

  // ---- products ----
  const auto x = rows_of<T>(params.x, params.x_stride, first_row, params.rows, params.depth);
  float sums[ROWS][COLS], gates[GATED ? ROWS : 1][COLS];
  multiply_rows<T>(
      sums, buffers, x,
      rows_of<T>(params.weight, params.weight_stride, first_column, params.columns, params.depth));
  if constexpr (GATED) {
    multiply_rows<T>(gates, buffers, x,
                     rows_of<T>(params.gate_weight, params.gate_stride, first_column,
                                params.columns, params.depth));
  }

  // ---- out ----
#pragma unroll
  for (int e = 0; e < ROWS; ++e) {
    const int64_t row = first_row + Map::row() + offset_of(e);
    if (row >= params.rows) continue;
    T* out = static_cast<T*>(params.out) + row * params.out_stride;
#pragma unroll
    for (int j = 0; j < COLS; ++j) {
      const int column = first_column + Map::col() + offset_of(j);
      if (column >= params.columns) continue;
      const float gate = GATED ? gates[GATED ? e : 0][j] : 0.f;
      const float value = activated<T, ACTIVATION, GATED>(params, column, sums[e][j], gate);
      out[column] = from_float<T>(value + residual_at<T>(params, row, column));
    }
  }
}
