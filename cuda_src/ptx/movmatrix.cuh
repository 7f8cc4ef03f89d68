// movmatrix (sm_75) transposes an 8x8 matrix of 16-bit elements across the lanes of a warp.
// PTX ISA: "Warp-level matrix transpose instruction: movmatrix".
#pragma once
#include "../common/types.cuh"

// Lane 4 g + c holds row g, columns 2c and 2c + 1, of the matrix in `a` and of its transpose in the
// result.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
