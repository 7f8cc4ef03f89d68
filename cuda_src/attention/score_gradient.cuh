// The gradient of the score, written here once for all tensor-core kernels of the backward pass, on
// the fragments of score.cuh. lse_log2 and delta come from flash_bwd_preprocess.cu:
//
//   s = the score of S                      apply_score(), then the mask
//   P = exp2(scale_log2 * s - lse_log2)     recompute_weights()
//   dP = 0 where dropout dropped P, else dP / (1 - p)
//   dS = P * (dP - delta)                   score_gradient(), like the lines around it
//   dbias += dS
//   dS *= 1 - tanh^2                        the slope of the softcap, or that of a text
//
// The kernels multiply dK and dQ by `scale`, and dV by 1 / (1 - p), at the end.
#pragma once
#include "text/parts.cuh"

// Turns S into the score, except for the mask, as Score::apply() does, and writes the slope at
// every score to `slope`: d tanh(x) / dx with a softcap, the derivative of a text by scale * S, and
// nothing without either.
template <class Options, class Params, Rows ROWS, int N, class AddBiasTile = NoBiasTile>
__device__ __forceinline__ void apply_score(float (&s)[N][4], float (&slope)[N][4],
                                            const Score<Options, Params>& score,
                                            const ScorePlace<ROWS>& at,
                                            AddBiasTile add_bias_tile = {}, bool masked = MASKED,
                                            Tanhs tanhs = Tanhs::ONE_BY_ONE) {
  score.apply_softcap(s, tanhs);
  if constexpr (Options::SOFTCAP) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) slope[n][i] = 1.f - s[n][i] * s[n][i];
    }
  }
  score.template for_each_place<HAS_USER_SCORE>(
      s, at, masked, [&](float& x, int n, int i, auto query, auto key) {
        const text::Dual y = text::user_score(text::Dual(score.inner * x, 1.f), at.batch, at.head,
                                              query, key, score.params);
        x = y.value;
        slope[n][i] = y.slope;
      });
  score.apply_position_terms(s, at, add_bias_tile, masked);
}

// apply_score() for a text in parts, whose slope is that of slope_of_parts() if the parts decide
// it.
template <class Options, class Params, Rows ROWS, int N, class AddBiasTile>
__device__ __forceinline__ void apply_score_of_parts(float (&s)[N][4], float (&slope)[N][4],
                                                     const Score<Options, Params>& score,
                                                     const ScorePlace<ROWS>& at,
                                                     const text::LaneParts<N>& lane_parts,
                                                     AddBiasTile add_bias_tile, bool masked) {
  text::for_each_with_parts(
      s, lane_parts, score, at, masked,
      [&](float& x, int n, int i, const text::Parts& parts, auto query, auto key) {
        if constexpr (has_part(TextParts::SLOPE)) {
          x = text::score_of_parts(text::Scaled(x, score.inner), parts, at.batch, at.head, query,
                                   key, score.params);
        } else {
          const text::Dual y = text::score_of_parts(text::Dual(score.inner * x, 1.f), parts,
                                                    at.batch, at.head, query, key, score.params);
          x = y.value;
          slope[n][i] = y.slope;
        }
      });
  score.apply_position_terms(s, at, add_bias_tile, masked);
}

// Computes the slope of the score where that depends on the parts alone.
template <class Options, class Params, Rows ROWS, int N>
__device__ __forceinline__ void slope_of_parts(float (&slope)[N][4],
                                               const Score<Options, Params>& score,
                                               const ScorePlace<ROWS>& at,
                                               const text::LaneParts<N>& lane_parts, bool masked) {
  text::for_each_with_parts(
      slope, lane_parts, score, at, masked,
      [&](float& x, int, int, const text::Parts& parts, auto query, auto key) {
        const text::Dual zero(0.f, 1.f);
        x = text::score_of_parts(zero, parts, at.batch, at.head, query, key, score.params).slope;
      });
}

// Turns the score into P. With dropout, a dropped weight gets a negative sign (Dropped::NEGATIVE),
// because dS needs its value while dV must leave it out. lse_log2(n, i) belongs to the query of
// element [n][i], and the score is `factor` times s.
template <class Options, class Params, Rows ROWS, int N, class Lse>
__device__ __forceinline__ void recompute_weights(float (&s)[N][4],
                                                  const Score<Options, Params>& score,
                                                  const ScorePlace<ROWS>& at, Lse lse_log2,
                                                  float factor = 1.f) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[n][i] = exp2_approx(s[n][i] * (factor * score.scale_log2) - lse_log2(n, i));
    }
  }
  if constexpr (Options::DROPOUT) {
    const Dropout dropout(*at.dropout_seed, score.params, at.batch, at.head);
    if constexpr (ROWS == Rows::QUERIES) {
      dropout.template apply<Dropped::NEGATIVE>(s, at.row, at.col);
    } else {
      dropout.template apply_transposed<Dropped::NEGATIVE>(s, at.row, at.col);
    }
  }
}

// Copies weights, with 0 for those that dropout has marked by a negative sign.
template <int N>
__device__ __forceinline__ void keep_weights(float (&kept)[N][4], const float (&p)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) kept[n][i] = kept_weight(p[n][i]);
  }
}
template <int M, int N>
__device__ __forceinline__ void keep_weights(float (&kept)[M][N][4], const float (&p)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m) keep_weights(kept[m], p[m]);
}

// Returns the weights for dV: P itself, or with dropout `kept`, a copy that is 0 where a weight is
// dropped.
template <class Options, class Fragments>
__device__ __forceinline__ const Fragments& kept_weights(Fragments& kept, const Fragments& p) {
  if constexpr (Options::DROPOUT) {
    keep_weights(kept, p);
    return kept;
  } else {
    return p;
  }
}

// Multiplies a gradient by the slope of the score.
template <class Options, int N>
__device__ __forceinline__ void apply_slope(float (&gradient)[N][4], const float (&slope)[N][4]) {
  if constexpr (Options::HAS_SLOPE) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) gradient[n][i] *= slope[n][i];
    }
  }
}

// Turns dP into P * (dP - delta), and removes the signs of dropped weights from p. delta(n, i)
// belongs to the query of element [n][i].
template <class Options, int N, class Delta>
__device__ __forceinline__ void softmax_gradient(float (&dp)[N][4], float (&p)[N][4],
                                                 const AttentionShape& shape, Delta delta) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Options::DROPOUT) {
        const bool dropped = p[n][i] < 0.f;
        dp[n][i] = dropped ? 0.f : dp[n][i] * shape.dropout_scale;
        p[n][i] = fabsf(p[n][i]);
      }
      dp[n][i] = p[n][i] * (dp[n][i] - delta(n, i));
    }
  }
}

// Adds dS to the gradient of the bias, if the caller has asked for that gradient. A gradient that
// is stored comes from shared memory, later.
template <class Options, class Params, Rows ROWS, int N>
__device__ __forceinline__ void add_bias_gradient(const float (&ds)[N][4], const Params& params,
                                                  const ScorePlace<ROWS>& at) {
  if constexpr (has_gradient(Options::BIAS) && !stores_gradient(Options::BIAS)) {
    if (params.dbias) {
      const BiasHead<float> dbias(params.dbias, params.dbias_strides, at.sequence, at.batch,
                                  at.head);
      if constexpr (ROWS == Rows::QUERIES) {
        dbias.red_add_from(ds, at.row, at.col);
      } else {
        dbias.transposed().red_add_from(ds, at.row, at.col);
      }
    }
  }
}

// Turns dP into dS, the gradient of scale * S.
template <class Options, class Params, Rows ROWS, int N, class Delta>
__device__ __forceinline__ void score_gradient(float (&dp)[N][4], float (&p)[N][4],
                                               const float (&slope)[N][4], const Params& params,
                                               const ScorePlace<ROWS>& at, Delta delta) {
  softmax_gradient<Options>(dp, p, params.shape, delta);
  add_bias_gradient<Options>(dp, params, at);
  apply_slope<Options>(dp, slope);
}
