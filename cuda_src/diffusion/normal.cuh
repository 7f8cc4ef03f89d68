// Normal numbers from random words; `normal` in cupyflash/ops/diffusion/reference.py computes the
// same.
#pragma once
#include "../ptx/math.cuh"

// Returns two independent standard normal numbers from two random words (Box and Muller), of which
// it uses 24 bits each, as a float holds no more.
__device__ __forceinline__ float2 normal_pair(uint32_t a, uint32_t b) {
  // u = ((a >> 8) + 1) / 2^24 in (0, 1], and an angle of (b >> 8) / 2^23 half turns in [-1, 1).
  const float log2_u = log2_accurate(float((a >> 8) + 1u), -24);
  const float angle = (PI * 0x1p-23f) * float(int(b) >> 8);
  const float radius = sqrt_approx(-2.f * LN2 * log2_u);
  return {radius * cos_approx(angle), radius * sin_approx(angle)};
}
