// Random numbers that depend on nothing but a key and a counter: Philox4x32-10 of Salmon, Moraes,
// Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC11). cupyflash/philox.py computes the
// same.
#pragma once
#include "../ptx/math.cuh"

__device__ __forceinline__ uint4 philox(uint4 counter, uint64_t seed) {
  uint32_t key_x = uint32_t(seed), key_y = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xd2511f53u) * counter.x, b = uint64_t(0xcd9e8d57u) * counter.z;
    counter = {uint32_t(b >> 32) ^ counter.y ^ key_x, uint32_t(b),
               uint32_t(a >> 32) ^ counter.w ^ key_y, uint32_t(a)};
    key_x += 0x9e3779b9u;
    key_y += 0xbb67ae85u;
  }
  return counter;
}

// Two independent standard normal numbers from two random words (Box and Muller). 24 bits are what
// a float holds.
__device__ __forceinline__ float2 normal_pair(uint32_t a, uint32_t b) {
  const float u = float((a >> 8) + 1u) * 0x1p-24f;    // (0, 1]
  const float angle = float(int(b) >> 8) * 0x1p-23f;  // of half turns, [-1, 1)
  const float radius = sqrt_approx(-2.f * LN2 * log2_accurate(u));
  return {radius * cos_approx(PI * angle), radius * sin_approx(PI * angle)};
}
