// Unnormalised probabilities as integers. Their sums are exact, so they do not depend on the order
// in which threads add. Every operation on floats is rounded on its own (no fused multiply-add), so
// that cupyflash/ops/decode/reference.py computes the same bits.
#pragma once
#include "../common/types.cuh"

constexpr int ONE = 40;  // the largest logit has the weight 2^ONE

// 2^(-scale * distance) * 2^ONE, rounded down, for a logit that is `distance` below the largest.
__device__ __forceinline__ uint64_t weight_of(float distance, float scale) {
  const float exponent = -__fmul_rn(distance, scale);
  if (!(exponent > -(ONE + 1.f))) return 0;
  const float whole = floorf(exponent);
  const float x = __fsub_rn(exponent, whole);
  // This polynomial is 2^x for x in [0, 1], with an error of 2^-23.
  float y = 0x1.e974fap-10f;
  y = __fadd_rn(__fmul_rn(y, x), 0x1.277856p-7f);
  y = __fadd_rn(__fmul_rn(y, x), 0x1.c91ce6p-5f);
  y = __fadd_rn(__fmul_rn(y, x), 0x1.ebdb56p-3f);
  y = __fadd_rn(__fmul_rn(y, x), 0x1.62e4bap-1f);
  y = fminf(__fadd_rn(__fmul_rn(y, x), 1.f), 0x1.fffffep+0f);
  const uint64_t mantissa = (__float_as_uint(y) & 0x7fffffu) | 0x800000u;
  return (mantissa << (ONE - 23)) >> int(-whole);
}
