// Online softmax on accumulator fragments (Milakov & Gimelshein 2018; FlashAttention-2).
//
// A lane holds parts of two rows of each 16-row fragment, and the four lanes of a quad hold these
// rows together. The running maximum is kept in the units of the scores. The sum stays a partial
// sum of this lane until the end, so that the lanes exchange only the maximum in the loop.
#pragma once
#include "../common/warp.cuh"
#include "../ptx/math.cuh"

// exp2(s * scale_log2 - offset) is computed with one fused multiply-add. Its product is exact, but
// the offset, which is the maximum times scale_log2, has been rounded. From this size on the error
// of the rounding is a unit of the exponent or more, and all weights of a row would overflow or
// vanish together.
constexpr float HUGE_LOG2 = 0x1p24f;

// The scale of a row with this maximum. For huge scores it is a power of two, whose product with
// the maximum is exact. It may be as little as half of the true scale, but this changes the weights
// no more than a change of the last digit of the scores would: neighbouring floats of this size
// differ by two or more units of the exponent.
__device__ __forceinline__ float row_scale(float max, float scale_log2) {
  const float power_of_two = __uint_as_float(__float_as_uint(scale_log2) & 0x7f800000u);
  return fabsf(max * scale_log2) < HUGE_LOG2 ? scale_log2 : power_of_two;
}

// The default of scores_read, which does nothing.
struct Nothing {
  __device__ void operator()() const {}
};

// Takes the place of the order in sm90/ordered_softmax.cuh where exponentials wait for nobody.
struct NoOrder {
  __device__ float begin() const { return 0.f; }
  template <int N>
  __device__ void end(const float (&)[N][4]) const {}
};

// A term of the scores of a row that is linear in the column: in the units of the scores
// term[half] + slope * (the distance from the lane's first column). `factor` is that of the scores.
// IN_PRODUCT: they have the slope already.
template <bool IN_PRODUCT>
struct LinearTerm {
  static constexpr bool MAY_FAIL = false;
  float slope;
  float term[2];
  float factor;

  // A score of the row with its term, times the scale, less the offset.
  __device__ float scaled(float score, int half, int column, float scale, float offset) const {
    const float row = term[half] * scale - offset;
    return score * (factor * scale) + (IN_PRODUCT ? row : slope * scale * float(column) + row);
  }
};
// A product and a term that all scores of a warp have in common.
struct CommonTerm {
  static constexpr bool MAY_FAIL = false;
  float factor;
  float term;

  __device__ float scaled(float score, int, int, float scale, float offset) const {
    return score * (factor * scale) + (term * scale - offset);
  }
};
struct NoLinearTerm {
  static constexpr bool MAY_FAIL = false;
  __device__ float scaled(float score, int, int, float scale, float offset) const {
    return score * scale - offset;
  }
};

// The argument `at_old_max` of a step that always looks for a new maximum.
constexpr bool AT_NEW_MAX = false;

// The state of the online softmax for the two rows of a lane: their running maxima and sums.
struct RowState {
  // The maximum starts below every score but finite. So a row that has seen no key needs no test:
  // the exponential of -inf minus a finite number is 0. A test costs 3 to 5 % at head dim 128,
  // because ptxas then puts all exponentials behind the wait for O += P V.
  float max[2];
  float sum[2];
  float rescale[2];  // the factor that the last update requires of the output so far

  __device__ __forceinline__ void begin(float scale_log2) {
    // The product with the scale must be finite, too.
    max[0] = max[1] = scale_log2 <= 1.f ? -FLOAT_MAX : -0x1p127f * rcp_approx(scale_log2);
    sum[0] = sum[1] = 0.f;
  }

  // Replaces scores by weights relative to the new maximum of their row, and sets `rescale`. Calls
  // scores_read() when every score has been read. BOUNDED means that a softcap keeps scores from
  // being huge, so that all rows have one scale; kernels with a softcap have no registers for a
  // scale of each row.
  //
  // The exponentials of both rows come before the sums, because ptxas then computes the maximum of
  // the second row beside the exponentials of the first.
  template <bool BOUNDED, int N, class Function = Nothing>
  __device__ __forceinline__ void update(float (&scores)[N][4], float scale_log2,
                                         Function scores_read = {}) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float new_max = max[half];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        new_max = fmaxf(new_max, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      }
      new_max = quad_max(new_max);
      if (half == 1) scores_read();
      const float scale = BOUNDED ? scale_log2 : row_scale(new_max, scale_log2);
      const float offset = __fmul_rn(new_max, scale);
      // Both products are rounded in the same way (__fmul_rn is never contracted), so that a
      // maximum that stays gives exactly 1. Otherwise the sum would drift by a rounding error a
      // tile, and the callers could never skip the rescaling of O.
      rescale[half] = exp2_approx(__fmul_rn(max[half], scale) - offset);
      max[half] = new_max;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[n][i] = exp2_approx(scores[n][i] * scale - offset);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] *= rescale[half];
#pragma unroll
      for (int n = 0; n < N; ++n) sum[half] += scores[n][2 * half] + scores[n][2 * half + 1];
    }
  }

  // update() for a warp whose maxima will hardly move: nothing looks for new ones, the weights are
  // relative to the old ones, and `rescale` is 1. Any number near the maximum would do as well: in
  // floating point, weights above 1 are as exact as those below. Returns false, with the state as
  // it was, if the weights of a row reach `limit` or are NaN: then the scores are lost, and the
  // caller computes them again, for update(). `term` is what the scores lack; one that MAY_FAIL
  // counts, too.
  template <int N, class Order = NoOrder, class Term = NoLinearTerm>
  __device__ __forceinline__ bool update_at_old_max(float (&scores)[N][4], float scale_log2,
                                                    float limit, Order order = {}, Term term = {}) {
    const float zero = order.begin();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = row_scale(max[half], scale_log2);
      const float offset = __fmul_rn(max[half], scale) - zero;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        // Every four octets it waits for the first weight of five octets before.
        if constexpr (Term::MAY_FAIL) {
          if (n % 4 == 0 && n >= 8) term.wait_for(scores[n - 5][2 * half]);
        }
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[n][i] = exp2_approx(term.scaled(scores[n][i], half, n * 8 + i % 2, scale, offset));
        }
      }
    }
    order.end(scores);
    float sums[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < N; ++n) sums[half] += scores[n][2 * half] + scores[n][2 * half + 1];
    }
    bool serves = sums[0] < limit && sums[1] < limit;
    if constexpr (Term::MAY_FAIL) serves = serves && term.served();
    if (!__all_sync(0xffffffffu, serves)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += sums[half];
      rescale[half] = 1.f;
    }
    return true;
  }

  // The maximum times scale_log2, and the sum of the weights relative to it. They are kept apart
  // because for huge scores their LSE would round the sum away.
  __device__ __forceinline__ float2 partial(int half, float scale_log2) const {
    return {__fmul_rn(max[half], scale_log2), quad_sum(sum[half])};
  }

  // After the last tile: returns the factor that normalises the output, and sets `lse` to the
  // natural log-sum-exp. A sink is one more logit (times log2(e)) with a value vector of zeros;
  // -inf means none. The sum is relative to the rounded product that update() has subtracted, so
  // __fadd_rn keeps the compiler from contracting the product into a fused multiply-add.
  __device__ __forceinline__ float finish(int half, float scale_log2, float& lse,
                                          float sink_log2 = -INF) const {
    auto [max_log2, total] = partial(half, scale_log2);
    float rescale = 1.f;
    if (sink_log2 != -INF) {
      const float new_max = fmaxf(max_log2, sink_log2);
      rescale = exp2_approx(max_log2 - new_max);
      total = total * rescale + exp2_approx(sink_log2 - new_max);
      max_log2 = new_max;
    }
    const bool empty = total == 0.f;  // a row that saw no key; a NaN is not empty
    lse = empty ? -INF : __fadd_rn(max_log2, log2_of_sum(total)) * LN2;
    return empty ? 0.f : rescale * rcp_approx(total);
  }
};
