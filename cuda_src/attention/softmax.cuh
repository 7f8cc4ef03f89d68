// Online softmax on accumulator fragments (Milakov & Gimelshein 2018; FlashAttention-2).
//
// A lane holds two rows of each 16-row fragment; the four lanes of a quad share them. The running
// maximum is kept in the units of the scores, the sum stays a partial sum of this lane until the
// end: only the maximum is exchanged in the loop.
#pragma once
#include "../common/warp.cuh"
#include "../ptx/math.cuh"

// exp2(s * scale_log2 - offset) is one fused multiply-add: its product is exact, the offset is
// rounded. From here on that rounding is half a unit of the exponent or more, and all weights of a
// row would overflow or vanish together.
constexpr float HUGE_LOG2 = 0x1p24f;

// The scale of a row with this maximum. That of huge scores is a power of two, whose product with
// the maximum is not rounded. It may be half of the true scale, which is as if scores had changed
// in their last digit: neighbouring floats of such a size are two or more units of the exponent
// apart.
__device__ __forceinline__ float row_scale(float max, float scale_log2) {
  const float power_of_two = __uint_as_float(__float_as_uint(scale_log2) & 0x7f800000u);
  return fabsf(max * scale_log2) < HUGE_LOG2 ? scale_log2 : power_of_two;
}

struct Nothing {
  __device__ void operator()() const {}
};

struct RowState {
  float max[2] = {-INF, -INF};
  float sum[2] = {0.f, 0.f};

  // Replaces scores by probabilities relative to the new maximum; rescale[i] is what the sums and
  // outputs so far must be multiplied with. Calls scores_read() when all scores have been read.
  // BOUNDED: by a softcap, so that they are not huge; it has no registers for a scale of each row.
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
      // A row that has seen no key: -inf - (-inf) would be NaN.
      offset[half] = new_max == -INF ? 0.f : __fmul_rn(new_max, scale[half]);
      // Both products rounded alike: a maximum that stays must give exactly 1, or the sum drifts by
      // a rounding a tile, and nothing is ever skipped.
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

  // The maximum times scale_log2, and the sum relative to it; of huge scores the LSE of the two
  // would keep nothing of the sum.
  __device__ __forceinline__ float2 partial(int half, float scale_log2) const {
    return {__fmul_rn(max[half], scale_log2), quad_sum(sum[half])};
  }

  // After the last tile: what to multiply the output with, and the log-sum-exp (natural). A sink is
  // one more logit (times log2(e)) without a value, -inf for none. The sum is relative to the
  // rounded product that update() has subtracted, so no fused multiply-add here.
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
