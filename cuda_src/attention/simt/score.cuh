// The score of the simt kernels, element by element: scale * q.k, softcap and ALiBi or a text, and
// bias, then dropout and the gradient. The steps are those of score.cuh and score_gradient.cuh, but
// with an exact tanh. Scores are multiplied by log2(e), so that their exponential is a bare exp2.
#pragma once
#include "../../ptx/math.cuh"
#include "../../ptx/opaque.cuh"
#include "../bias.cuh"
#include "../block_info.cuh"
#include "../dropout.cuh"
#include "tile.cuh"

template <bool SOFTCAP, bool ALIBI>
struct ScoreFunction {
  float inner;       // scale / softcap, or scale with a text: its argument per unit of q.k
  float outer;       // log2(e) * (scale or softcap), or log2(e) with a text
  float slope_log2;  // log2(e) * ALiBi slope
  const Captures& captures;
  int batch;
  int head;
  int last_query;
  int last_key;

  // Params is FlashFwdParams or FlashBwdParams.
  template <class Params>
  __device__ ScoreFunction(const Params& params, const Sequence& sequence, int batch, int head)
      : ScoreFunction(params, params, sequence, batch, head) {}

  template <class Params>
  __device__ ScoreFunction(const Params& params, const Captures& captures, const Sequence& sequence,
                           int batch, int head)
      : captures(captures),
        batch(batch),
        head(head),
        last_query(sequence.seqlen_q - 1),
        last_key(sequence.seqlen_k - 1) {
    const AttentionShape& shape = params.shape;
    inner = SOFTCAP ? shape.scale / shape.softcap : HAS_USER_SCORE ? shape.scale : 0.0f;
    outer = LOG2E * (SOFTCAP ? shape.softcap : HAS_USER_SCORE ? 1.0f : shape.scale);
    slope_log2 =
        ALIBI ? LOG2E * params.alibi_slopes[batch * params.alibi_batch_stride + head] : 0.0f;
  }

  // The score times log2(e), from dot = q.k. `distance` is the distance of the key from the
  // diagonal, col - (row + diagonal). `derivative` becomes the derivative of the score with respect
  // to scale * q.k, which is 1 without a softcap or a text.
  __device__ float log2(float dot, int distance, int query, int key, float& derivative) const {
    derivative = 1.0f;
    if constexpr (SOFTCAP) {
      dot = tanhf(dot * inner);
      derivative = 1.0f - dot * dot;
    }
    if constexpr (HAS_USER_SCORE) {
      const text::Dual score =
          text::user_score(text::Dual(dot * inner, 1.0f), batch, head, min(query, last_query),
                           min(key, last_key), captures);
      dot = score.value;
      derivative = score.slope;
    }
    const float score = dot * outer;
    return ALIBI ? score - slope_log2 * fabsf(float(distance)) : score;
  }

  __device__ float log2(float dot, int distance, int query, int key) const {
    float derivative;
    return log2(dot, distance, query, key, derivative);
  }

  // The score, or -inf where the mask of a text hides the key. Positions past the end, which no
  // capture has, are taken for the last ones.
  __device__ float masked(float score, int query, int key) const {
    if constexpr (HAS_USER_MASK) {
      if (!text::user_mask(batch, head, min(query, last_query), min(key, last_key), captures))
        return -INF;
    }
    return score;
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
  __device__ E* at(int row, int col) const {
    return first + row * opaque(row_stride) + col * opaque(col_stride);
  }

  // Adds dS of the thread's scores to the gradient of the bias.
  template <int ROWS, int COLS>
  __device__ __forceinline__ void red_add_from(const float (&ds)[ROWS][COLS]) const {
#pragma unroll
    for (int e = 0; e < ROWS; ++e) {
#pragma unroll
      for (int j = 0; j < COLS; ++j) {
        if (exists(offset_of(e), offset_of(j))) red_add(at(offset_of(e), offset_of(j)), ds[e][j]);
      }
    }
  }

  // Returns a score (times log2(e)) with the bias added. Where no bias exists, the mask takes care
  // of the score.
  __device__ float add_to(float score, int row, int col) const {
    return exists(row, col) ? add_bias(score, *at(row, col), LOG2E) : score;
  }
};

// The bias of a thread's scores, with the key mask where KIND has one.
template <typename T, BiasKind KIND>
struct ThreadScoreBias {
  ThreadBias<const BiasElement<T, KIND>> elements;
  KeyBits bits;
  int first_key;  // that of the thread's first score

  __device__ ThreadScoreBias(const ScoreBias<T, KIND>& bias, int row, int col)
      : elements(bias.elements, row, col), bits(bias.bits), first_key(col) {}

  __device__ float add_to(float score, int row, int col) const {
    if constexpr (KIND == BiasKind::NONE) return score;
    if constexpr (has_key_mask(KIND)) {
      if (!elements.exists(row, col)) return score;
      if (!bits.sees(first_key + col)) return -INF;
    }
    return elements.add_to(score, row, col);
  }
};

// Dropout of a thread's tile of weights. dropout.cuh has the numbering of the random bits: one call
// of philox serves rows r and r + 8, and columns c, c + 1, c + 8 and c + 9.
struct SimtDropout {
  uint64_t seed;
  uint32_t limit;  // in the upper 16 bits
  FirstWeight first;

  template <class Params>
  __device__ SimtDropout(const Params& params, int batch, int head)
      : seed(*params.dropout_seed),
        limit(uint32_t(params.shape.dropout_threshold) << 16),
        first(first_weight(params, batch, head)) {}

  // Marks each weight by its lowest bit, 1 if it is dropped. The sign will not do: a weight that
  // has been multiplied by the slope of a score may be negative. row and col are those of the
  // thread's first weight. The loop is not unrolled, because its calls side by side would take too
  // many registers.
  template <int ROWS, int COLS>
  __device__ __forceinline__ void mark(float (&weights)[ROWS][COLS], uint32_t row,
                                       uint32_t col) const {
    row += first.row;
    col += first.col;
    uint64_t dropped = 0;  // a bit for each weight, 16 for rows i and i + 4
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const uint32_t r = row + i;
      uint32_t bits = 0;
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint32_t c = col + j;
        const uint4 random = philox(seed, r / 16 * 8 + r % 8, c / 16 * 4 + c / 2 % 4, first.z);
#pragma unroll
        for (int half = 0; half < ROWS / 4; ++half) {
          const bool lower = ROWS == 8 ? half : r / 8 % 2;
#pragma unroll
          for (int k = j; k < COLS; k += 4) {
            const bool right = COLS == 8 ? k / 4 : c / 8 % 2;
            const uint32_t word = right ? lower ? random.w : random.y : lower ? random.z : random.x;
            if (word << 16 < limit) bits |= 1u << (8 * half + k);
            if (word < limit) bits |= 2u << (8 * half + k);
          }
        }
      }
      dropped |= uint64_t(bits) << (16 * i);
    }
#pragma unroll
    for (int e = 0; e < ROWS; ++e) {
#pragma unroll
      for (int j = 0; j < COLS; ++j) {
        const uint32_t bit = dropped >> (16 * (e % 4) + 8 * (e / 4) + j) & 1;
        weights[e][j] = __uint_as_float((__float_as_uint(weights[e][j]) & ~1u) | bit);
      }
    }
  }
};

// Whether dropout keeps a weight that mark() has seen.
__device__ __forceinline__ bool is_kept(float weight) { return !(__float_as_uint(weight) & 1); }

// Turns a weight, as mark() has left it, into the gradient of the score. dp is its element of dP.
template <bool DROPOUT>
__device__ __forceinline__ void score_gradient(float& weight, float dp, float delta,
                                               const AttentionShape& shape) {
  if constexpr (DROPOUT) dp = is_kept(weight) ? dp * shape.dropout_scale : 0.0f;
  weight *= dp - delta;
}
