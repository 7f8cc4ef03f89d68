// Reductions over a warp, or over each quad of a warp (lanes 4 g to 4 g + 3). All lanes that take
// part get the same bits.
#pragma once

__device__ __forceinline__ float warp_sum(float x) {
  for (int mask = 1; mask < 32; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
  for (int mask = 1; mask < 32; mask *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
