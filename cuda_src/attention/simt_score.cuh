// The score of the simt kernels, element by element: scale * q.k, softcap, ALiBi and bias, then
// dropout and the gradient. The steps are those of score.cuh and score_gradient.cuh, but with an
// exact tanh. Scores are multiplied by log2(e), so that their exponential is a bare exp2.
#pragma once
#include "../common/philox.cuh"
#include "../ptx/math.cuh"
#include "bias.cuh"
#include "block_info.cuh"
#include "simt_tile.cuh"

template <bool SOFTCAP, bool ALIBI>
struct ScoreFunction {
  float inner;       // softcap only: scale / softcap, the argument of tanh per unit of q.k
  float outer;       // log2(e) * (scale or softcap)
  float slope_log2;  // log2(e) * ALiBi slope

  __device__ ScoreFunction(const AttentionShape& shape, const float* alibi_slopes,
                           int64_t alibi_batch_stride, int batch, int head) {
    inner = SOFTCAP ? shape.scale / shape.softcap : 0.0f;
    outer = LOG2E * (SOFTCAP ? shape.softcap : shape.scale);
    slope_log2 = ALIBI ? LOG2E * alibi_slopes[batch * alibi_batch_stride + head] : 0.0f;
  }

  // The score times log2(e), from dot = q.k. `distance` is the distance of the key from the
  // diagonal, col - (row + diagonal). `derivative` becomes the derivative of the score with respect
  // to scale * q.k, which is 1 without a softcap.
  __device__ float log2(float dot, int distance, float& derivative) const {
    derivative = 1.0f;
    if constexpr (SOFTCAP) {
      dot = tanhf(dot * inner);
      derivative = 1.0f - dot * dot;
    }
    const float score = dot * outer;
    return ALIBI ? score - slope_log2 * fabsf(float(distance)) : score;
  }

  __device__ float log2(float dot, int distance) const {
    float derivative;
    return log2(dot, distance, derivative);
  }
};

// Whether a key at this distance from the diagonal is in the window. One unsigned comparison tests
// both ends.
__device__ __forceinline__ bool in_window(const Sequence& sequence, int distance) {
  const uint32_t place = uint32_t(distance + sequence.window_left);  // huge if left of the window
  return place <= uint32_t(sequence.window_left + sequence.window_right);
}

// The elements of a bias, or of its gradient, that belong to a thread's scores. Rows and columns
// count from the first ones of the thread.
template <typename E>
struct ThreadBias {
  E* first;
  int64_t row_stride;
  int64_t col_stride;
  int rows;  // the number of rows that exist, from the first one on
  int cols;

  __device__ ThreadBias(const BiasHead<E>& bias, int row, int col)
      : first(bias.data + row * bias.row_stride + col * bias.col_stride),
        row_stride(bias.row_stride),
        col_stride(bias.col_stride),
        rows(bias.rows - row),
        cols(bias.cols - col) {}

  __device__ bool exists(int row, int col) const { return row < rows && col < cols; }
  __device__ E* at(int row, int col) const { return first + row * row_stride + col * col_stride; }

  // Adds dS of the thread's scores to the gradient of the bias.
  template <int ROWS>
  __device__ __forceinline__ void red_add_from(const float (&ds)[ROWS][4]) const {
#pragma unroll
    for (int e = 0; e < ROWS; ++e) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (exists(row_offset<ROWS>(e), column_offset(j)))
          red_add(at(row_offset<ROWS>(e), column_offset(j)), ds[e][j]);
      }
    }
  }

  // Returns a score (times log2(e)) with the bias added. Where no bias exists, the mask takes care
  // of the score.
  __device__ float add_to(float score, int row, int col) const {
    return exists(row, col) ? add_bias(score, *at(row, col), LOG2E) : score;
  }
};

// Dropout of a thread's tile of weights. dropout.cuh has the numbering of the random bits. The
// thread uses one call of philox for rows r and r + 8 of a column.
struct SimtDropout {
  uint64_t seed;
  uint32_t limit;  // in the upper 16 bits
  uint32_t z;

  __device__ SimtDropout(const int64_t* seed, const AttentionShape& shape, int batch, int head)
      : seed(*seed),
        limit(uint32_t(shape.dropout_threshold) << 16),
        z(batch * shape.heads_q + head) {}

  // Marks dropped weights by a negative sign; weights are never negative. row and col are those of
  // the thread's first weight. The rows of the tile are queries, or keys if it is TRANSPOSED.
  template <bool TRANSPOSED, int ROWS>
  __device__ __forceinline__ void mark(float (&weights)[ROWS][4], uint32_t row,
                                       uint32_t col) const {
#pragma unroll
    for (int pair = 0; pair < ROWS / 2; ++pair) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t r = row + 16 * pair, c = col + column_offset(j);
        const uint32_t query = TRANSPOSED ? c : r, key = TRANSPOSED ? r : c;
        const uint4 random =
            philox(seed, query / 16 * 8 + query % 8, key / 16 * 4 + key / 2 % 4, z);
        const bool right = c / 8 % 2;
        const uint32_t words[2] = {
            right ? TRANSPOSED ? random.z : random.y : random.x,
            right        ? random.w
            : TRANSPOSED ? random.y
                         : random.z,
        };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // The thread's element whose row is 16 * pair + 8 * half after its first row.
          constexpr int STEP = ROWS == 8 ? 1 : 2;
          float& weight = weights[STEP * pair + (ROWS == 8 ? 4 : 1) * half][j];
          const uint32_t bits = key % 2 ? words[half] : words[half] << 16;
          if (bits < limit) weight = -weight;
        }
      }
    }
  }
};

// Whether dropout keeps a weight that mark() has seen.
__device__ __forceinline__ bool is_kept(float weight) { return __float_as_int(weight) >= 0; }

// Turns a weight, as mark() has left it, into the gradient of the score. dp is its element of dP.
template <bool DROPOUT>
__device__ __forceinline__ void score_gradient(float& weight, float dp, float delta,
                                               const AttentionShape& shape) {
  if constexpr (DROPOUT) {
    dp = is_kept(weight) ? dp * shape.dropout_scale : 0.0f;
    weight = fabsf(weight);
  }
  weight *= dp - delta;
}
