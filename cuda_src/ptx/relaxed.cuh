// Relaxed loads and stores of global memory, for values that one block writes while others poll
// them. Each is a single access of 32 bits. It goes to memory that all multiprocessors share, but
// does not order any other access of the thread. PTX ISA: "Memory consistency model" (sm_70).
#pragma once
#include "../common/types.cuh"

__device__ __forceinline__ float ld_relaxed(const float* address) {
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");
  return v;
}

// Loads four 32-bit values, each by an access of its own, if `valid`; otherwise `v` stays as it is.
// The condition is a predicate in PTX, not a branch, so that several loads can be in flight at
// once.
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
