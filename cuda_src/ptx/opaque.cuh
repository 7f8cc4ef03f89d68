// No instruction at all: a value that the optimizer knows nothing about.
#pragma once
#include "../common/types.cuh"

// The compiler computes all multiples of a stride ahead of the loops around it and keeps them
// there, two registers each. From an opaque stride it must add them up where they are used.
__device__ __forceinline__ int64_t opaque(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
