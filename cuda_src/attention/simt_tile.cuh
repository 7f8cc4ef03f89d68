// Threads, shared memory and global loads of the simt kernels, which use no tensor cores and need
// no alignment.
//
// A block of 128 threads works on a tile of BLOCK rows x 64 columns of scores, seen as 8 x 16
// threads; ROWS = BLOCK / 8 is 8, or 4 where two wide output accumulators must fit the registers.
// Two products (simt_gemm.cuh) make up all three kernels:
//   multiply_transposed   acc = A B^T   A [BLOCK][head_dim], B [64][head_dim]   S, dP
//   multiply_add          acc += W B    W [BLOCK][64], B [64][head_dim]         O, dQ, dK, dV
//
// Thread (ty, tx) holds, with i and j from 0 to 3 and h from 0 to ROWS / 4 - 1,
//   rows      ty + 8 h + 2 ROWS i   as element e = 4 h + i
//   columns   tx + 16 j             of the scores
// The elements are spread like this because A, B and W lie in shared memory *transposed*, one line
// per index of the sum, in the order in which a thread reads them: slot 4 r + i of a line holds row
// r + (rows / 4) i. So one 16-byte read fetches four rows of a thread, another its four columns,
// and 32 FFMA follow on three reads. A lane reads the same 16 bytes as lane ^ 1 (columns) or lane ^
// 2 (rows), because such a read takes two cycles instead of four.
//
// Shared memory, at most 35 KB for any head dimension, so that every GPU runs it:
//   operands  A^T [32][BLOCK + 4] and B^T [32][64 + 4], 32 columns of the head dimension at a time;
//             or for multiply_add B [rows][HEAD_DIM], not transposed, with rows * HEAD_DIM <= 4096
//   weights   W^T [64][BLOCK + 8]
// The paddings make the transposing 16-byte stores free of bank conflicts.
//
// Global loads are scalar, 32 lanes along the head dimension. Rows and columns outside the matrix
// read as zero, so whatever lies there (NaN, another sequence) never enters the arithmetic.
#pragma once
#include "../common/convert.cuh"
#include "../ptx/opaque.cuh"
#include "block_info.cuh"

constexpr int SIMT_THREADS = 128;
constexpr int SIMT_WARPS = SIMT_THREADS / 32;
constexpr int SCORE_COLUMNS = 64;
constexpr int CHUNK = 32;  // columns of the head dimension in shared memory at a time

// ---- matrices in global memory ----

// T is const for inputs. The last dimension is contiguous.
template <typename T>
struct Matrix {
  T* data;
  int64_t row_stride;
  int rows;
  int columns;

  __device__ Matrix from_row(int row) const {
    return {data + row * row_stride, row_stride, rows - row, columns};
  }
};

template <typename T, typename Void>
__device__ __forceinline__ Matrix<T> head_matrix(Void* data, const Strides& strides, int batch,
                                                 int64_t first_row, int head, int rows,
                                                 int columns) {
  return {static_cast<T*>(data) + strides.at(batch, first_row, head), strides.row, rows, columns};
}

// ---- which rows and columns a thread holds ----

__device__ __forceinline__ int thread_y() {
  return int(threadIdx.x) / 32 * 2 + int(threadIdx.x) % 2;
}
__device__ __forceinline__ int thread_x() { return int(threadIdx.x) % 32 / 2; }

// These offsets are constants that do not include the thread's own place. An address for the thread
// then takes one register, and the offsets are part of the instructions; with the thread's place in
// them each element would take a register.
template <int ROWS>
__host__ __device__ constexpr int row_offset(int e) {
  return 8 * (e / 4) + 2 * ROWS * (e % 4);
}

__host__ __device__ constexpr int column_offset(int j) { return 16 * j; }

// The HEAD_DIM / 16 columns of a thread in an output accumulator come in groups of VECTOR, each of
// which one vector read fetches.
template <int HEAD_DIM>
constexpr int VECTOR = HEAD_DIM / 16 < 4 ? HEAD_DIM / 16 : 4;

template <int HEAD_DIM>
__host__ __device__ constexpr int output_offset(int c) {
  constexpr int V = VECTOR<HEAD_DIM>;
  return c / V * 16 * V + c % V;
}

// A row lies on 16 lanes: all but the lowest bit of the lane index.
template <typename Op>
__device__ __forceinline__ float reduce_row(float x, Op op) {
#pragma unroll
  for (int mask = 2; mask < 32; mask *= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

// ---- shared memory ----

template <int ROWS, int HEAD_DIM>
struct SimtStorage {
  static constexpr int BLOCK = 8 * ROWS;
  static constexpr int LD_A = BLOCK + 4;
  static constexpr int LD_B = SCORE_COLUMNS + 4;
  static constexpr int LD_WEIGHTS = BLOCK + 8;
  // The rows of B in multiply_add: a multiple of the number of warps, with at most 4096 elements.
  static constexpr int CHUNK_ROWS = HEAD_DIM <= 64 ? 64 : HEAD_DIM <= 128 ? 32 : 16;

  union Operands {
    struct {
      float a[CHUNK * LD_A];
      float b[CHUNK * LD_B];
    } transposed;
    float b[CHUNK_ROWS * HEAD_DIM];
  };

  alignas(16) Operands operands;
  alignas(16) float weights[SCORE_COLUMNS * LD_WEIGHTS];
};

// Reads N values from shared memory by one instruction.
template <int N>
__device__ __forceinline__ void load_vector(float* dst, const float* src) {
  if constexpr (N == 4) {
    const float4 v = *reinterpret_cast<const float4*>(src);
    dst[0] = v.x, dst[1] = v.y, dst[2] = v.z, dst[3] = v.w;
  } else {
    static_assert(N == 2, "a vector has two or four elements");
    const float2 v = *reinterpret_cast<const float2*>(src);
    dst[0] = v.x, dst[1] = v.y;
  }
}

// Reads columns [column, column + 32) of N rows to registers, on their way to shared memory. Each
// lane reads one column, and each warp every SIMT_WARPS-th row.
template <int N, typename T>
__device__ __forceinline__ void read_columns(float (&values)[N / SIMT_WARPS],
                                             const Matrix<const T>& m, int column) {
  const int warp = int(threadIdx.x) / 32;
  const int lane = int(threadIdx.x) % 32;
  const T* src = m.data + warp * m.row_stride + column + lane;
  const int64_t row_step = opaque(SIMT_WARPS * m.row_stride);
  const int rows = column + lane < m.columns ? m.rows - warp : 0;
#pragma unroll
  for (int t = 0; t < N / SIMT_WARPS; ++t) {
    const T value = SIMT_WARPS * t < rows ? *src : T{};
    values[t] = to_float(value);
    src += row_step;
  }
}

// Writes what read_columns() has read, transposed: one line a column, with the rows in the order of
// the slots above.
template <int N>
__device__ __forceinline__ void write_transposed(float* dst,
                                                 const float (&values)[N / SIMT_WARPS]) {
  constexpr int SLOTS = N / (4 * SIMT_WARPS);  // four rows in each
  float* slot = dst + int(threadIdx.x) % 32 * (N + 4) + int(threadIdx.x) / 32 * 4;
#pragma unroll
  for (int u = 0; u < SLOTS; ++u)
    *reinterpret_cast<float4*>(slot + 4 * SIMT_WARPS * u) =
        make_float4(values[u], values[u + SLOTS], values[u + 2 * SLOTS], values[u + 3 * SLOTS]);
}

// Reads N whole rows to registers, for write_rows().
template <int N, int HEAD_DIM, typename T>
__device__ __forceinline__ void read_rows(float (&values)[N / SIMT_WARPS][HEAD_DIM / 32],
                                          const Matrix<const T>& m) {
  const int warp = int(threadIdx.x) / 32;
  const int lane = int(threadIdx.x) % 32;
  const T* src = m.data + warp * m.row_stride + lane;
  const int64_t row_step = opaque(SIMT_WARPS * m.row_stride);
#pragma unroll
  for (int t = 0; t < N / SIMT_WARPS; ++t) {
    const int columns = SIMT_WARPS * t < m.rows - warp ? m.columns - lane : 0;
#pragma unroll
    for (int g = 0; g < HEAD_DIM / 32; ++g) {
      const T value = 32 * g < columns ? src[32 * g] : T{};
      values[t][g] = to_float(value);
    }
    src += row_step;
  }
}

// Writes what read_rows() has read, row by row.
template <int N, int HEAD_DIM>
__device__ __forceinline__ void write_rows(float* dst,
                                           const float (&values)[N / SIMT_WARPS][HEAD_DIM / 32]) {
  float* line = dst + int(threadIdx.x) / 32 * HEAD_DIM + int(threadIdx.x) % 32;
#pragma unroll
  for (int t = 0; t < N / SIMT_WARPS; ++t) {
#pragma unroll
    for (int g = 0; g < HEAD_DIM / 32; ++g) line[SIMT_WARPS * HEAD_DIM * t + 32 * g] = values[t][g];
  }
}

// Each thread writes its weights to shared memory for multiply_add. Between the previous
// multiply_add and this there must be a barrier (multiply_transposed starts with one).
template <int ROWS, int HEAD_DIM>
__device__ __forceinline__ void store_weights(SimtStorage<ROWS, HEAD_DIM>& smem,
                                              const float (&w)[ROWS][4]) {
  float* first = smem.weights + thread_x() * smem.LD_WEIGHTS + 4 * thread_y();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float* line = first + column_offset(j) * smem.LD_WEIGHTS;
#pragma unroll
    for (int h = 0; h < ROWS / 4; ++h)
      *reinterpret_cast<float4*>(line + 32 * h) =
          make_float4(w[4 * h][j], w[4 * h + 1][j], w[4 * h + 2][j], w[4 * h + 3][j]);
  }
}

// Reads back the weights that store_weights() of the same thread has stored. Keeping them there
// saves 4 ROWS registers during a product.
template <int ROWS, int HEAD_DIM>
__device__ __forceinline__ void load_weights(float (&w)[ROWS][4],
                                             const SimtStorage<ROWS, HEAD_DIM>& smem) {
  const float* first = smem.weights + thread_x() * smem.LD_WEIGHTS + 4 * thread_y();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int h = 0; h < ROWS / 4; ++h) {
      float values[4];
      load_vector<4>(values, first + column_offset(j) * smem.LD_WEIGHTS + 32 * h);
#pragma unroll
      for (int i = 0; i < 4; ++i) w[4 * h + i][j] = values[i];
    }
  }
}
