// The bias of the scores in an accumulator fragment of 16 rows (see ptx/mma.cuh; wgmma accumulators
// have the same layout, warp by warp), and its gradient.
#pragma once
#include "../common/convert.cuh"
#include "../ptx/atomics.cuh"
#include "block_info.cuh"
#include "key_mask.cuh"

// The kinds of bias, numbered from 0; the host reads their names here. A key mask (key_mask.cuh)
// stands alone or beside a bias.
enum class BiasKind {
  NONE,
  DTYPE_OF_Q,
  BOOL,  // a mask, which is not added: the query sees the key where its element is nonzero
  FLOAT32,
  DTYPE_OF_Q_BY_TMA,  // sm_90: TMA loads tiles of it (sm90/bias_tile.cuh)
  KEY_MASK,
  KEY_MASK_AND_DTYPE_OF_Q,
  KEY_MASK_AND_FLOAT32,
  KEY_MASK_AND_DTYPE_OF_Q_BY_TMA,
  STORED_GRADIENT,  // DTYPE_OF_Q_BY_TMA, whose gradient is stored (sm90/stored_gradient.cuh)
};

__host__ __device__ constexpr bool has_key_mask(BiasKind kind) {
  return BiasKind::KEY_MASK <= kind && kind <= BiasKind::KEY_MASK_AND_DTYPE_OF_Q_BY_TMA;
}
__host__ __device__ constexpr bool is_by_tma(BiasKind kind) {
  return kind == BiasKind::DTYPE_OF_Q_BY_TMA || kind == BiasKind::KEY_MASK_AND_DTYPE_OF_Q_BY_TMA ||
         kind == BiasKind::STORED_GRADIENT;
}
__host__ __device__ constexpr bool is_float32(BiasKind kind) {
  return kind == BiasKind::FLOAT32 || kind == BiasKind::KEY_MASK_AND_FLOAT32;
}
// A key mask alone has none either, but its kernels test params.dbias, which is null there, as they
// did when they were measured.
__host__ __device__ constexpr bool has_gradient(BiasKind kind) {
  return kind != BiasKind::NONE && kind != BiasKind::BOOL;
}
__host__ __device__ constexpr bool stores_gradient(BiasKind kind) {
  return kind == BiasKind::STORED_GRADIENT;
}

// The type of an element of the bias, if q has type T.
template <typename T, BiasKind KIND>
using BiasElement = typename Choose<KIND == BiasKind::BOOL, uint8_t,
                                    typename Choose<is_float32(KIND), float, T>::Type>::Type;

// Added to a bias of this size, a score has no digit left in float32, and the exponent would be
// wrong by whole units: in exp2(s * scale_log2 - max * scale_log2) the first product is exact, but
// the second is rounded. So a bias of -BIAS_LIMIT or less counts as -inf, and a bias above
// BIAS_LIMIT is cut off there. Masks that are written as -1e9 or finfo.min therefore do mask.
constexpr float BIAS_LIMIT = 16777216.f;

// bias_scale is one unit of the bias in the units of the score. A NaN in the bias stays a NaN.
template <typename E>
__device__ __forceinline__ float add_bias(float score, E bias, float bias_scale) {
  float x = to_float(bias);
  x = x <= -BIAS_LIMIT ? -INF : x > BIAS_LIMIT ? BIAS_LIMIT : x;
  return score + x * bias_scale;
}
__device__ __forceinline__ float add_bias(float score, uint8_t seen, float) {
  return seen ? score : -INF;
}

// The bias of one head, or its gradient, with an element for each query (row) and key (col). All
// address arithmetic has 64 bits, because an expanded or transposed view may have any strides.
template <typename E>
struct BiasHead {
  E* data;
  int64_t row_stride;
  int64_t col_stride;
  int rows;
  int cols;

  __device__ BiasHead(E* bias, const BiasStrides& strides, const Sequence& sequence, int batch,
                      int head)
      : BiasHead(bias + strides.at(batch, head), strides.row, strides.col, sequence.seqlen_q,
                 sequence.seqlen_k) {}

  // The same elements for a fragment whose rows are keys and whose columns are queries.
  __device__ BiasHead transposed() const { return {data, col_stride, row_stride, cols, rows}; }

  // Adds the bias to scores; row and col are those of acc[0][0] in this lane. Elements that do not
  // exist are never read: the mask takes care of their scores.
  template <int N>
  __device__ __forceinline__ void add_to(float (&acc)[N][4], int row, int col,
                                         float bias_scale) const {
    E* from[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      from[half] = data + min(row + half * 8, rows - 1) * row_stride + col * col_stride;
    }
    if (has_pairs() && col + 8 * N - 7 < cols) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Pair pair = *reinterpret_cast<const Pair*>(from[half] + n * 8);
          acc[n][2 * half] = add_bias(acc[n][2 * half], pair.first, bias_scale);
          acc[n][2 * half + 1] = add_bias(acc[n][2 * half + 1], pair.second, bias_scale);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (col + n * 8 < cols)
            acc[n][2 * half] = add_bias(acc[n][2 * half], *from[half], bias_scale);
          if (col + n * 8 + 1 < cols) {
            acc[n][2 * half + 1] =
                add_bias(acc[n][2 * half + 1], from[half][col_stride], bias_scale);
          }
          from[half] += 8 * col_stride;
        }
      }
    }
  }

  // Adds the gradient of the scores to that of the bias in global memory (float).
  template <int N>
  __device__ __forceinline__ void red_add_from(const float (&acc)[N][4], int row, int col) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= rows) continue;
      E* to = data + (row + half * 8) * row_stride + col * col_stride;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (col + n * 8 < cols) red_add(to, acc[n][2 * half]);
        if (col + n * 8 + 1 < cols) red_add(to + col_stride, acc[n][2 * half + 1]);
        to += 8 * col_stride;
      }
    }
  }

 private:
  struct alignas(2 * sizeof(E)) Pair {
    E first;
    E second;
  };

  __device__ BiasHead(E* data, int64_t row_stride, int64_t col_stride, int rows, int cols)
      : data(data), row_stride(row_stride), col_stride(col_stride), rows(rows), cols(cols) {}

  // Whether one aligned load reads two neighbouring columns, the first one even, in every row.
  __device__ bool has_pairs() const {
    return col_stride == 1 && row_stride % 2 == 0 &&
           reinterpret_cast<uint64_t>(data) % sizeof(Pair) == 0;
  }
};

// The bias of the scores of one head, with the key mask of its sequence where KIND has one. There
// params.bias points to a MaskRecord.
template <typename T, BiasKind KIND>
struct ScoreBias {
  using Element = const BiasElement<T, KIND>;
  BiasHead<Element> elements;
  KeyBits bits;

  // Params is FlashFwdParams or FlashBwdParams.
  template <class Params>
  __device__ ScoreBias(const Params& params, const Sequence& sequence, int batch, int head)
      : elements(static_cast<Element*>(has_key_mask(KIND)
                                           ? static_cast<const MaskRecord*>(params.bias)->bias
                                           : params.bias),
                 params.bias_strides, sequence, batch, head),
        bits(has_key_mask(KIND) ? KeyBits(params.bias, batch) : KeyBits(nullptr)) {}

  // Adds it to scores whose rows are queries; row and col are those of acc[0][0] in this lane.
  template <int N>
  __device__ __forceinline__ void add_to(float (&acc)[N][4], int row, int col,
                                         float bias_scale) const {
    if constexpr (KIND != BiasKind::KEY_MASK) elements.add_to(acc, row, col, bias_scale);
    if constexpr (has_key_mask(KIND)) bits.apply(acc, col);
  }

  // Adds it to scores whose rows are keys.
  template <int N>
  __device__ __forceinline__ void add_to_transposed(float (&acc)[N][4], int row, int col,
                                                    float bias_scale) const {
    if constexpr (KIND != BiasKind::KEY_MASK)
      elements.transposed().add_to(acc, row, col, bias_scale);
    if constexpr (has_key_mask(KIND)) bits.apply_transposed(acc, row);
  }
};
