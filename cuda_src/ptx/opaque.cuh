// Values that the optimizer knows nothing about.
#pragma once
#include "../common/types.cuh"

// The compiler computes all multiples of a stride ahead of the loops around it and keeps them
// there, two registers each. From an opaque stride it must add them up where they are used.
__device__ __forceinline__ int64_t opaque(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// To global memory. From such a pointer constant distances become part of the instructions that
// load and store.
template <typename T>
__device__ __forceinline__ T* opaque(T* x) {
  asm volatile("" : "+l"(x));
  __builtin_assume(__isGlobal(x));
  return x;
}

// The same for what was computed from a value: it is computed again instead of being kept.
__device__ __forceinline__ float opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// threadIdx.x, read anew: what derives from it is computed again where it is needed, instead of
// being kept in registers through the main loop by common subexpression elimination.
__device__ __forceinline__ int fresh_thread_index() {
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  return tid;
}
