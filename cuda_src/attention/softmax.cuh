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

// The state of the online softmax for the two rows of a lane: their running maxima and sums.
struct RowState {
  float max[2] = {-INF, -INF};
  float sum[2] = {0.f, 0.f};

  // Replaces scores by weights relative to the new maximum of their row. The caller must multiply
  // the output so far by rescale[i]. Calls scores_read() when every score has been read.
  // BOUNDED means that a softcap keeps scores from being huge, so that all rows have one scale;
  // kernels with a softcap have no registers for a scale of each row.
  template <bool BOUNDED, int N, class Function = Nothing>
  __device__ __forceinline__ void update(float (&scores)[N][4], float scale_log2,
                                         float (&rescale)[2], Function scores_read = {}) {
    float scale[2], offset[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float new_max = max[half];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        new_max = fmaxf(new_max, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      }
      new_max = quad_max(new_max);
      scale[half] = BOUNDED ? scale_log2 : row_scale(new_max, scale_log2);
      // For a row that has seen no key, -inf - (-inf) would be NaN.
      offset[half] = new_max == -INF ? 0.f : __fmul_rn(new_max, scale[half]);
      // Both products are rounded in the same way (__fmul_rn is never contracted), so that a
      // maximum that stays gives exactly 1. Otherwise the sum would drift by a rounding error a
      // tile, and the callers could never skip the rescaling of O.
      rescale[half] = exp2_approx(__fmul_rn(max[half], scale[half]) - offset[half]);
      max[half] = new_max;
    }
    scores_read();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float partial = 0.f;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[n][i] = exp2_approx(scores[n][i] * scale[half] - offset[half]);
          partial += scores[n][i];
        }
      }
      sum[half] = sum[half] * rescale[half] + partial;
    }
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
