// The score: the steps between S = Q K^T and the softmax. They are written here once for all
// tensor-core kernels, on an accumulator fragment of 16 rows (see ptx/mma.cuh; wgmma accumulators
// have the same layout, warp by warp):
//
//   s = softcap * tanh(scale * S / softcap)    or scale * S without a softcap
//   s = s - alibi_slope * |distance from the diagonal|
//   s = text::user_score(scale * S)            in the place of both, where there is one (text.cuh)
//   s = s + bias                               a Boolean bias masks instead
//   s = -inf                                   where the query does not see the key, or where
//                                              text::user_mask() says so
//   P = softmax(s)                             softmax.cuh; score_gradient.cuh in the backward
//   P = 0 where dropout drops a weight         the output is scaled by 1 / (1 - p) at the end
//
// An option is a field of ScoreOptions and a line of Score; its gradient is in score_gradient.cuh.
// The kernels for CUDA cores have the same steps element by element, in simt/score.cuh.
#pragma once
#include "../ptx/math.cuh"
#include "bias.cuh"
#include "block_info.cuh"
#include "dropout.cuh"
#include "mask.cuh"
#include "softmax.cuh"
#include "text/seen_scores.cuh"
#include "text/tanh.cuh"

// The options that are fixed when a kernel is compiled. T is the dtype of q.
//
// EXACT_TANH: tanh is right to the last places of float32, at twice the instructions. tanh_exp2 has
// the absolute error of a large tanh where tanh is small, too. Times a cap of 50 that is nothing
// beside the rounding of 16-bit weights, but more than all other errors of float32.
template <typename T_, bool SOFTCAP_, bool ALIBI_, BiasKind BIAS_, bool DROPOUT_,
          bool EXACT_TANH_ = false>
struct ScoreOptions {
  using T = T_;
  static constexpr bool SOFTCAP = SOFTCAP_;
  static constexpr bool ALIBI = ALIBI_;
  static constexpr BiasKind BIAS = BIAS_;
  static constexpr bool DROPOUT = DROPOUT_;
  static constexpr bool EXACT_TANH = EXACT_TANH_;
  static constexpr bool NONE =
      !SOFTCAP && !ALIBI && BIAS == BiasKind::NONE && !DROPOUT && !HAS_USER_SCORE && !HAS_USER_MASK;
  // Whether the score is another function of S than a product, which has a slope of its own.
  static constexpr bool HAS_SLOPE = SOFTCAP || HAS_USER_SCORE;
  // Whether the forward has ALiBi as a line off the diagonal (text/lines.cuh), which takes
  // registers.
  static constexpr bool ALIBI_IS_LINE = ALIBI && !is_by_tma(BIAS);
  static_assert(!HAS_USER_SCORE || !(SOFTCAP || ALIBI), "a text takes the place of both");
};

// The argument `masked` of a step over a tile of scores.
constexpr bool UNMASKED = false;
constexpr bool MASKED = true;

// How a tanh of the score is computed: one by one, or four at a time (text/tanh.cuh). Then
// a NaN makes others NaN, too, or counts as infinity.
enum class Tanhs { ONE_BY_ONE, BY_FOURS_OR_NAN, BY_FOURS_WITHOUT_NAN, SMALL_APART };

// The rows of a fragment are queries in S and keys in its transpose.
enum class Rows { QUERIES, KEYS };

// Says which scores a fragment holds. Most of these fields lie in shared memory. They are
// references so that they are read where they are needed, and take no registers before.
template <Rows ROWS>
struct ScorePlace {
  const Sequence& sequence;
  const int& batch;
  const int& head;
  const float& alibi_slope;
  const int64_t* dropout_seed;  // null without dropout
  int row;                      // that of element [0][0] in this lane
  int col;

  // The place for scores that are computed a second time, in a rare case. What a text has computed
  // from the positions the first time would wait in registers for it.
  __device__ __forceinline__ ScorePlace again() const {
    if constexpr (!HAS_USER_SCORE) return *this;
    return {sequence, batch, head, alibi_slope, dropout_seed, opaque(row), opaque(col)};
  }
};

template <class Options, class Params>
__device__ __forceinline__ float load_alibi_slope(const Params& params, int batch, int head) {
  return Options::ALIBI ? params.alibi_slopes[batch * params.alibi_batch_stride + head] : 0.f;
}

// Takes the place of the function that adds a bias from shared memory, in kernels without one.
struct NoBiasTile {};

// The steps of the score. Params is FlashFwdParams or FlashBwdParams. s stays in the units of S,
// with a softcap in those of tanh, and with a text in those of the score, until the softmax
// computes exp2(scale_log2 * s). scale_log2 is positive, so the largest s belongs to the largest
// score.
template <class Options, class Params>
struct Score {
  const Params& params;
  float scale_log2;
  float inner;  // the factor of S in the function of it: scale / softcap, or the scale of a text

  __device__ explicit Score(const Params& params)
      : params(params),
        scale_log2(outer(params.shape) * LOG2E),
        inner(Options::SOFTCAP ? params.shape.scale * inverse(params.shape.softcap)
              : HAS_USER_SCORE ? params.shape.scale
                               : 0.f) {}

  // Turns S into the score, except for the mask. add_bias_tile(s, bias_scale) adds a bias that lies
  // in shared memory, and where rows are queries the key mask beside it. `masked`: some rows or
  // columns of the tile may be past the end, or hidden by the mask of a text. `at_old_max`: the
  // scores lack ALiBi where that is linear, and a NaN may make others of its warp NaN, for
  // update_at_old_max() finds it.
  template <Rows ROWS, int N, class AddBiasTile = NoBiasTile>
  __device__ __forceinline__ void apply(float (&s)[N][4], const ScorePlace<ROWS>& at,
                                        AddBiasTile add_bias_tile = {}, bool masked = MASKED,
                                        bool at_old_max = false) const {
    apply_softcap(s, at_old_max ? Tanhs::BY_FOURS_OR_NAN : Tanhs::ONE_BY_ONE);
    if (HAS_USER_TANH && at_old_max) {
      apply_tanh_of_text(s, at, masked);
    } else {
      for_each_place<HAS_USER_SCORE>(s, at, masked, [&](float& x, int, int, auto query, auto key) {
        x = text::user_score(text::Scaled(x, inner), at.batch, at.head, query, key, params);
      });
    }
    apply_position_terms(s, at, add_bias_tile, masked, !at_old_max);
  }

  // Converts a term of the score (an ALiBi slope, or one unit of a bias) to the units of s.
  __device__ float to_units(float term) const { return term * LOG2E * rcp_approx(scale_log2); }

  // Calls function(s[n][i], n, i, query, key) for each element, with Places. There `query` and
  // `key` are the last ones in the place of those past the end, so that a text may read its
  // captures there.
  template <bool WANTED, Rows ROWS, int N, class Function>
  __device__ __forceinline__ void for_each_place(float (&s)[N][4], const ScorePlace<ROWS>& at,
                                                 bool masked, Function function) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      for_each_place_of_octet<WANTED>(
          at, n, masked, [&](int i, auto query, auto key) { function(s[n][i], n, i, query, key); });
    }
  }

  // Sets the scores that the mask of a text hides in a partial tile to -inf.
  template <int N>
  __device__ __forceinline__ void apply_seen(float (&s)[N][4], const SeenScores<N>& seen) const {
    if constexpr (HAS_MASK_TILES) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!(seen.words[n / 8] >> (n % 8 * 4 + i) & 1)) s[n][i] = -INF;
        }
      }
    }
  }

  // Sets the scores of keys that a query does not see to -inf. Most tiles do not need this.
  template <Rows ROWS, int N>
  __device__ __forceinline__ void apply_mask(float (&s)[N][4], const ScorePlace<ROWS>& at) const {
    if constexpr (ROWS == Rows::QUERIES) {
      mask_scores(s, at.sequence, at.row, at.col);
    } else {
      mask_scores_transposed(s, at.sequence, at.row, at.col);
    }
  }

  template <int N>
  __device__ __forceinline__ void apply_softcap(float (&s)[N][4],
                                                Tanhs tanhs = Tanhs::ONE_BY_ONE) const {
    if constexpr (Options::SOFTCAP) {
      using Small = text::SmallTanh<7>;
      if (tanhs == Tanhs::SMALL_APART &&
          __all_sync(0xffffffffu, text::largest_argument(s, inner) < Small::LIMIT)) {
        Small tanh(inner);
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s[n][i] = tanh(s[n][i]);
        }
        return;
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (tanhs != Tanhs::ONE_BY_ONE) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s[n][i] *= inner * (2.f * LOG2E);
          text::tanh_of_four_log2(s[n], tanhs == Tanhs::BY_FOURS_OR_NAN);
          continue;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = s[n][i] * inner;
          s[n][i] = Options::EXACT_TANH ? tanhf(x) : tanh_exp2(x);
        }
      }
    }
  }

  // Adds the terms that depend on the positions of query and key, and not on their product. The
  // mask of a text comes last.
  template <Rows ROWS, int N, class AddBiasTile = NoBiasTile>
  __device__ __forceinline__ void apply_position_terms(float (&s)[N][4], const ScorePlace<ROWS>& at,
                                                       AddBiasTile add_bias_tile = {},
                                                       bool masked = MASKED,
                                                       bool with_alibi = true) const {
    if constexpr (Options::ALIBI) {
      if (with_alibi || !Options::ALIBI_IS_LINE) subtract_alibi(s, at);
    }
    if constexpr (is_by_tma(Options::BIAS)) {
      add_bias_tile(s, to_units(1.f));
      if constexpr (ROWS == Rows::KEYS && has_key_mask(Options::BIAS))
        KeyBits(params.bias, at.batch).apply_transposed(s, at.row);
    } else if constexpr (Options::BIAS != BiasKind::NONE) {
      const ScoreBias<typename Options::T, Options::BIAS> bias(params, at.sequence, at.batch,
                                                               at.head);
      if constexpr (ROWS == Rows::QUERIES) {
        bias.add_to(s, at.row, at.col, to_units(1.f));
      } else {
        bias.add_to_transposed(s, at.row, at.col, to_units(1.f));
      }
    }
    for_each_place<HAS_USER_MASK && !HAS_MASK_TILES>(
        s, at, masked, [&](float& x, int, int, auto query, auto key) {
          if (!text::user_mask(at.batch, at.head, query, key, params)) x = -INF;
        });
  }

  // Sets the weights that dropout drops to 0. The softmax sums all weights, so this comes after it.
  template <int N>
  __device__ __forceinline__ void apply_dropout(float (&p)[N][4],
                                                const ScorePlace<Rows::QUERIES>& at) const {
    if constexpr (Options::DROPOUT) {
      Dropout(*at.dropout_seed, params, at.batch, at.head)
          .template apply<Dropped::ZERO>(p, at.row, at.col);
    }
  }

 private:
  // Computes the scores of a text with one tanh. A NaN makes others NaN.
  template <Rows ROWS, int N>
  __device__ __forceinline__ void apply_tanh_of_text(float (&s)[N][4], const ScorePlace<ROWS>& at,
                                                     bool masked) const {
    constexpr bool keeps_nan = true;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float bounded[4];
      for_each_place_of_octet<HAS_USER_TANH>(at, n, masked, [&](int i, auto query, auto key) {
        const text::Scaled x(s[n][i], inner);
        bounded[i] = text::tanh_argument(x, at.batch, at.head, query, key, params) * (2.f * LOG2E);
      });
      text::tanh_of_four_log2(bounded, keeps_nan);
      for_each_place_of_octet<HAS_USER_TANH>(at, n, masked, [&](int i, auto query, auto key) {
        const text::Scaled x(s[n][i], inner);
        s[n][i] = text::score_of_tanh(x, bounded[i], at.batch, at.head, query, key, params);
      });
    }
  }

  // The part of for_each_place() for eight columns.
  template <bool WANTED, Rows ROWS, class Function>
  __device__ __forceinline__ void for_each_place_of_octet(const ScorePlace<ROWS>& at, int n,
                                                          bool masked, Function function) const {
    if constexpr (WANTED) {
      const int last_query = at.sequence.seqlen_q - 1, last_key = at.sequence.seqlen_k - 1;
      const int last_row = ROWS == Rows::QUERIES ? last_query : last_key;
      const int last_col = ROWS == Rows::QUERIES ? last_key : last_query;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const text::Place row = place_of(at.row, i / 2 * 8, last_row, at.col, masked);
        const text::Place col = place_of(at.col, n * 8 + i % 2, last_col, at.col, masked);
        function(i, ROWS == Rows::QUERIES ? row : col, ROWS == Rows::QUERIES ? col : row);
      }
    }
  }

  __device__ static text::Place place_of(int first, int step, int last, int column, bool masked) {
    const int at = min(first + step, last);
    return masked ? text::Place{at, 0, float(at - column)}
                  : text::Place{first, step, float(first - column)};
  }

  // The factor of s in the score.
  __device__ static float outer(const AttentionShape& shape) {
    return Options::SOFTCAP ? shape.softcap : HAS_USER_SCORE ? 1.f : shape.scale;
  }

  __device__ static float inverse(float softcap) {
    return Options::EXACT_TANH ? 1.f / softcap : rcp_approx(softcap);
  }

  // Subtracts slope * |query + diagonal - key|. In a transposed fragment, whose rows are keys, the
  // distance is |row - diagonal - col|.
  template <Rows ROWS, int N>
  __device__ __forceinline__ void subtract_alibi(float (&s)[N][4],
                                                 const ScorePlace<ROWS>& at) const {
    const float slope = to_units(at.alibi_slope);
    const int diagonal = ROWS == Rows::QUERIES ? at.sequence.diagonal : -at.sequence.diagonal;
    const float distance = float(at.row + diagonal - at.col);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] -= slope * fabsf(distance + float(i / 2 * 8 - n * 8 - i % 2));
      }
    }
  }
};
