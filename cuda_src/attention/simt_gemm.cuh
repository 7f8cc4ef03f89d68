// The two matrix products of the simt kernels. simt_tile.cuh has the map from threads to elements
// and the plan of shared memory.
#pragma once
#include "simt_tile.cuh"

// acc = A B^T. Both operands come through shared memory, 32 columns of the head dimension at a
// time.
template <int ROWS, int HEAD_DIM, typename T>
__device__ __forceinline__ void multiply_transposed(float (&acc)[ROWS][4],
                                                    SimtStorage<ROWS, HEAD_DIM>& smem,
                                                    const Matrix<const T>& a,
                                                    const Matrix<const T>& b) {
  constexpr bool READ_BOTH = HEAD_DIM < 256;  // otherwise the loads of both need too many registers
#pragma unroll
  for (int e = 0; e < ROWS; ++e) {
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[e][j] = 0.0f;
  }
  for (int column = 0; column < a.columns; column += CHUNK) {
    float a_values[8 * ROWS / SIMT_WARPS], b_values[SCORE_COLUMNS / SIMT_WARPS];
    read_columns<8 * ROWS>(a_values, a, column);
    if constexpr (READ_BOTH) read_columns<SCORE_COLUMNS>(b_values, b, column);
    __syncthreads();  // no thread reads the operands of the last chunk any more
    write_transposed<8 * ROWS>(smem.operands.transposed.a, a_values);
    if constexpr (!READ_BOTH) read_columns<SCORE_COLUMNS>(b_values, b, column);
    write_transposed<SCORE_COLUMNS>(smem.operands.transposed.b, b_values);
    __syncthreads();  // both operands are complete
    const float* line_a = smem.operands.transposed.a + 4 * thread_y();
    const float* line_b = smem.operands.transposed.b + 4 * thread_x();
    // The last chunk may be short; zeros fill it up to the next multiple of 8.
    for (int k = min(CHUNK, a.columns - column); k > 0; k -= 8) {
#pragma unroll
      for (int kk = 0; kk < 8; ++kk) {
        float a_frag[ROWS], b_frag[4];
#pragma unroll
        for (int h = 0; h < ROWS / 4; ++h) load_vector<4>(a_frag + 4 * h, line_a + 32 * h);
        load_vector<4>(b_frag, line_b);
#pragma unroll
        for (int e = 0; e < ROWS; ++e) {
#pragma unroll
          for (int j = 0; j < 4; ++j) acc[e][j] += a_frag[e] * b_frag[j];
        }
        line_a += smem.LD_A;
        line_b += smem.LD_B;
      }
    }
  }
}

// acc += W B, where store_weights() has written W. B comes through shared memory, CHUNK_ROWS rows
// at a time.
template <int ROWS, int HEAD_DIM, typename T>
__device__ __forceinline__ void multiply_add(float (&acc)[ROWS][HEAD_DIM / 16],
                                             SimtStorage<ROWS, HEAD_DIM>& smem,
                                             const Matrix<const T>& b) {
  using Storage = SimtStorage<ROWS, HEAD_DIM>;
  constexpr int COLUMNS = HEAD_DIM / 16;
  constexpr int V = VECTOR<HEAD_DIM>;
  for (int first = 0; first < min(SCORE_COLUMNS, b.rows); first += Storage::CHUNK_ROWS) {
    float values[Storage::CHUNK_ROWS / SIMT_WARPS][HEAD_DIM / 32];
    read_rows<Storage::CHUNK_ROWS, HEAD_DIM>(values, b.from_row(first));
    __syncthreads();  // W is complete, and no thread reads the last operands any more
    write_rows<Storage::CHUNK_ROWS, HEAD_DIM>(smem.operands.b, values);
    __syncthreads();  // the rows of B are complete
    // Each chunk has a sum of its own, for a few columns at a time, because one chain of float32
    // additions over the whole sequence would lose a digit.
#pragma unroll
    for (int group = 0; group < COLUMNS; group += V) {
      float sum[ROWS][V] = {};
      const float* line_w = smem.weights + first * smem.LD_WEIGHTS + 4 * thread_y();
      const float* line_b = smem.operands.b + V * thread_x() + 16 * group;
#pragma unroll 4
      for (int n = 0; n < Storage::CHUNK_ROWS; ++n) {
        float w_frag[ROWS], b_frag[V];
#pragma unroll
        for (int h = 0; h < ROWS / 4; ++h) load_vector<4>(w_frag + 4 * h, line_w + 32 * h);
        load_vector<V>(b_frag, line_b);
#pragma unroll
        for (int e = 0; e < ROWS; ++e) {
#pragma unroll
          for (int c = 0; c < V; ++c) sum[e][c] += w_frag[e] * b_frag[c];
        }
        line_w += smem.LD_WEIGHTS;
        line_b += HEAD_DIM;
      }
#pragma unroll
      for (int e = 0; e < ROWS; ++e) {
#pragma unroll
        for (int c = 0; c < V; ++c) acc[e][group + c] += sum[e][c];
      }
    }
  }
}

// Stores the accumulator times a factor, in the rows and columns that exist.
template <int ROWS, int HEAD_DIM, typename T>
__device__ __forceinline__ void store_output(const Matrix<T>& out,
                                             const float (&acc)[ROWS][HEAD_DIM / 16],
                                             float factor) {
  const int rows = out.rows - thread_y();
  const int columns = out.columns - VECTOR<HEAD_DIM> * thread_x();
  T* first = out.data + thread_y() * out.row_stride + VECTOR<HEAD_DIM> * thread_x();
#pragma unroll
  for (int e = 0; e < ROWS; ++e) {
    if (row_offset<ROWS>(e) >= rows) continue;
    T* row = first + row_offset<ROWS>(e) * out.row_stride;
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 16; ++c) {
      const int offset = output_offset<HEAD_DIM>(c);
      if (offset < columns) row[offset] = from_float<T>(acc[e][c] * factor);
    }
  }
}
