// The constants of a query row that the backward kernels use: lse_log2 and delta.
#pragma once
#include "../ptx/math.cuh"

// The size of an LSE from which on float32 keeps no digit of the weights; NaN is better than a
// wrong gradient there.
constexpr float HUGE_LSE = 0x1p24f;

// lse * log2(e), or +inf for a row without weights, so that exp2(score - lse_log2) is 0 there
// without a mask; NaN from HUGE_LSE on.
__device__ __forceinline__ float row_lse_log2(float lse) {
  const float lse_log2 = fabsf(lse) < HUGE_LSE ? lse * LOG2E : QUIET_NAN;
  return lse == -INF ? INF : lse_log2;
}

// The sum of dout * out minus the gradient of the LSE, because both enter dS = P * (dP - delta) in
// the same way; 0 for a row without weights.
__device__ __forceinline__ float row_delta(float lse, float sum, float dlse) {
  return lse == -INF ? 0.0f : sum - dlse;
}
