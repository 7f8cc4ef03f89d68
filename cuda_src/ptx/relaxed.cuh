// Numbers in global memory that one block writes while others wait for them: single accesses of 32
// bits that all multiprocessors see in one order, but which order nothing else.
// PTX ISA: "Memory consistency model" (sm_70).
#pragma once
#include "../common/types.cuh"

__device__ __forceinline__ float ld_relaxed(const float* address) {
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");
  return v;
}

// Four of them, each for itself.
__device__ __forceinline__ uint4 ld_relaxed_128(const void* address) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_relaxed(float* address, float value) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}
