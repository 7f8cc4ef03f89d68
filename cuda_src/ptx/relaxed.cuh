// Numbers in global memory that one block writes while others wait for them: single accesses of 32
// or 128 bits that all multiprocessors see in one order, but which order nothing else.
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

// All 16 bytes as one access (PTX 8.3): a reader sees those of a single store.
__device__ __forceinline__ uint4 ld_relaxed_b128(const uint4* address) {
  uint64_t low, high;
  asm volatile(
      "{\n"
      ".reg .b128 v;\n"
      "ld.relaxed.gpu.global.b128 v, [%2];\n"
      "mov.b128 {%0, %1}, v;\n"
      "}"
      : "=l"(low), "=l"(high)
      : "l"(address)
      : "memory");
  return make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32));
}

__device__ __forceinline__ void st_relaxed_b128(uint4* address, uint4 v) {
  asm volatile(
      "{\n"
      ".reg .b128 v;\n"
      "mov.b128 v, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], v;\n"
      "}" ::"l"(address),
      "l"(uint64_t(v.y) << 32 | v.x), "l"(uint64_t(v.w) << 32 | v.z)
      : "memory");
}
