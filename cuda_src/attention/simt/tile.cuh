// Threads, matrices and score tiles of the simt kernels, which use no tensor cores and need no
// alignment. gemm.cuh has their products.
//
// A block of 128 threads computes tiles of M x N elements. Each thread has ROWS x COLS of them, and
// both numbers are 8 or 4. Lanes l and l ^ 1 hold the same rows, and l and l ^ 2 the same columns,
// because a 16-byte read of shared memory takes two cycles then instead of four. The rows of a
// thread, and its columns, are four neighbours (+ 8, if there are eight), so that one such read
// fetches four, and one call of philox gives the bits of rows r and r + 8 and columns c and c + 8.
#pragma once
#include "../../common/convert.cuh"
#include "../../common/words.cuh"
#include "../../ptx/atomics.cuh"
#include "../block_info.cuh"

constexpr int SIMT_THREADS = 128;

// ---- matrices in global memory ----

// T is const for inputs. The last dimension is contiguous.
template <typename T>
struct Matrix {
  T* data;
  int64_t row_stride;
  int rows;
  int columns;
  bool vectors;  // four neighbouring elements, from a multiple of 4 on, can be loaded at once

  __device__ Matrix from_column(int column) const {
    return {data + column, row_stride, rows, columns - column, vectors};
  }
};

// The rows of a sequence in all heads. Kernels keep this in shared memory, where it is read when it
// is needed, and takes no registers before.
template <typename T>
struct SequenceRows {
  T* data;
  bool vectors;

  template <typename Void>
  __device__ void locate(Void* tensor, const Strides& strides, int batch, int64_t first_row,
                         const AttentionShape& shape) {
    data = static_cast<T*>(tensor) + strides.at(batch, first_row, 0);
    const int64_t all =
        reinterpret_cast<int64_t>(data) | (strides.row | strides.head) * int64_t(sizeof(T));
    vectors = all % int64_t(4 * sizeof(T)) == 0 && shape.head_dim % 4 == 0;
  }
  // The rows of one head, from `row` on up to `rows`.
  __device__ Matrix<T> matrix(const Strides& strides, int head, int row, int rows,
                              int columns) const {
    T* global = data;  // the compiler does not know that, once it has been in shared memory
    __builtin_assume(__isGlobal(global));
    return {global + strides.at(0, row, head), strides.row, rows - row, columns, vectors};
  }
};

// ---- which rows and columns a thread holds ----

template <int M, int N>
struct TileMap {
  static constexpr bool WIDE = N == 128;  // a row lies on 16 lanes instead of eight
  static constexpr int ROWS = M / (WIDE ? 8 : 16);
  static constexpr int COLS = N / (WIDE ? 16 : 8);
  static_assert((ROWS == 4 || ROWS == 8) && (COLS == 4 || COLS == 8), "four neighbours, or eight");

  // The first row and column of the thread.
  __device__ static int row() {
    const int tid = threadIdx.x;
    return tid / 32 * (M / 4) + (WIDE ? 0 : tid / 16 % 2 * 2 * ROWS) + tid / 2 % 2 * 4;
  }
  __device__ static int col() {
    const int tid = threadIdx.x;
    return tid / 4 % (WIDE ? 8 : 4) * 2 * COLS + tid % 2 * 4;
  }

  template <typename Op>
  __device__ static float reduce_row(float x, Op op) {
#pragma unroll
    for (int mask = 1; mask < (WIDE ? 32 : 16); mask *= 2) {
      if (mask != 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, mask));
    }
    return x;
  }
};

// The place of a thread's row or column i after its first one.
__host__ __device__ constexpr int offset_of(int i) { return i % 4 + i / 4 * 8; }

template <int ROWS, int COLS>
__device__ __forceinline__ void set_zero(float (&acc)[ROWS][COLS]) {
#pragma unroll
  for (int e = 0; e < ROWS; ++e) {
#pragma unroll
    for (int j = 0; j < COLS; ++j) acc[e][j] = 0.0f;
  }
}

template <int ROWS, int COLS>
__device__ __forceinline__ void add(float (&acc)[ROWS][COLS], const float (&x)[ROWS][COLS]) {
#pragma unroll
  for (int e = 0; e < ROWS; ++e) {
#pragma unroll
    for (int j = 0; j < COLS; ++j) acc[e][j] += x[e][j];
  }
}

// Adds four neighbouring floats to global memory; the address is a multiple of 16 bytes.
__device__ __forceinline__ void red_add_four(float* address, const float* x) {
  if constexpr (__CUDA_ARCH__ >= 900) {
    red_add(address, {x[0], x[1], x[2], x[3]});
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) red_add(address + i, x[i]);
  }
}

// ---- a tile of P or dS in shared memory, an operand of a product ----

// A line of N elements holds first the elements 0-7, 16-23, 32-39 ..., and in its second half 8-15,
// 24-31 ...: so eight lanes that read four elements each, from a multiple of 4 on, read 32
// neighbouring floats, which is free of bank conflicts.
template <int N>
__host__ __device__ constexpr int place_in_line(int element) {
  return element / 16 * 8 + element % 8 + element / 8 % 2 * (N / 2);
}

// Element i of a thread after its first one, if i is a multiple of 4.
template <int N>
__host__ __device__ constexpr int line_offset(int i) {
  return i / 4 * (N / 2);
}

// Distance of lines. The padding spreads the transposing stores over the banks.
template <int N>
constexpr int LINE = N + 4;

// A line for each row of the tile.
template <int M, int N, int ROWS, int COLS>
__device__ __forceinline__ void store_rows_of(float* tile, const float (&x)[ROWS][COLS]) {
  float* first = tile + TileMap<M, N>::row() * LINE<N> + place_in_line<N>(TileMap<M, N>::col());
#pragma unroll
  for (int e = 0; e < ROWS; ++e) {
#pragma unroll
    for (int j = 0; j < COLS; j += 4)
      *reinterpret_cast<float4*>(first + offset_of(e) * LINE<N> + line_offset<N>(j)) =
          make_float4(x[e][j], x[e][j + 1], x[e][j + 2], x[e][j + 3]);
  }
}

// Reads back what store_rows_of() of the same thread has stored.
template <int M, int N, int ROWS, int COLS>
__device__ __forceinline__ void load_rows_of(float (&x)[ROWS][COLS], const float* tile) {
  const float* first =
      tile + TileMap<M, N>::row() * LINE<N> + place_in_line<N>(TileMap<M, N>::col());
#pragma unroll
  for (int e = 0; e < ROWS; ++e) {
#pragma unroll
    for (int j = 0; j < COLS; j += 4) {
      const float4 v =
          *reinterpret_cast<const float4*>(first + offset_of(e) * LINE<N> + line_offset<N>(j));
      x[e][j] = v.x, x[e][j + 1] = v.y, x[e][j + 2] = v.z, x[e][j + 3] = v.w;
    }
  }
}

// A line for each column of the tile.
template <int M, int N, int ROWS, int COLS>
__device__ __forceinline__ void store_columns_of(float* tile, const float (&x)[ROWS][COLS]) {
  float* first = tile + TileMap<M, N>::col() * LINE<M> + place_in_line<M>(TileMap<M, N>::row());
#pragma unroll
  for (int j = 0; j < COLS; ++j) {
#pragma unroll
    for (int e = 0; e < ROWS; e += 4)
      *reinterpret_cast<float4*>(first + offset_of(j) * LINE<M> + line_offset<M>(e)) =
          make_float4(x[e][j], x[e + 1][j], x[e + 2][j], x[e + 3][j]);
  }
}
