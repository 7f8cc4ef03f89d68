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

// Four of them, each for itself, if `valid`; else `v` stays. The condition is in PTX so that there
// is no branch, and several loads are on their way at once.
__device__ __forceinline__ void ld_relaxed_128(uint4& v, const void* address, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.b32 valid, %5, 0;\n"
      "@valid ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(address), "r"(int(valid))
      : "memory");
}

__device__ __forceinline__ void st_relaxed(float* address, float value) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}
