// Normal numbers from random words; cupyflash/normal.py computes the same.
#pragma once
#include "../ptx/math.cuh"

// Two independent standard normal numbers from two random words (Box and Muller). 24 bits are what
// a float holds.
__device__ __forceinline__ float2 normal_pair(uint32_t a, uint32_t b) {
  const float u = float((a >> 8) + 1u) * 0x1p-24f;    // (0, 1]
  const float angle = float(int(b) >> 8) * 0x1p-23f;  // of half turns, [-1, 1)
  const float radius = sqrt_approx(-2.f * LN2 * log2_accurate(u));
  return {radius * cos_approx(PI * angle), radius * sin_approx(PI * angle)};
}
