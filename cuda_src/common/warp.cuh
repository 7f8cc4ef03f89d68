// Reductions over a warp; every lane gets the same bits.
#pragma once

__device__ __forceinline__ float warp_sum(float x) {
  for (int mask = 1; mask < 32; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
  for (int mask = 1; mask < 32; mask *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}
