// Loads from global memory under a predicate. In C++ the compiler would branch around the load.
// PTX ISA: "Predicated execution", "Data movement and conversion instructions: ld".
#pragma once
#include "../common/types.cuh"

// Loads 16 bytes if `condition` holds, and is zero otherwise.
__device__ __forceinline__ uint4 ld_global_if_128(const void* address, bool condition) {
  uint4 v;
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; "
      "mov.b32 %3, 0; @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(address), "r"(int(condition)));
  return v;
}

// The same with 8 bytes.
__device__ __forceinline__ uint2 ld_global_if_64(const void* address, bool condition) {
  uint2 v;
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; "
      "@p ld.global.v2.b32 {%0, %1}, [%2];}"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(address), "r"(int(condition)));
  return v;
}

// The same with 16 bytes of global memory that other multiprocessors have written in the same
// launch (ld_global_cg_128()), or of shared memory.
__device__ __forceinline__ uint4 ld_cg_if_128(const void* address, bool condition) {
  uint4 v;
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; "
      "mov.b32 %3, 0; @p ld.cg.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(address), "r"(int(condition))
      : "memory");
  return v;
}
__device__ __forceinline__ float2 ld_cg_if(const float2* address, bool condition) {
  float2 v;
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; "
      "@p ld.cg.v2.f32 {%0, %1}, [%2];}"
      : "=&f"(v.x), "=&f"(v.y)
      : "l"(address), "r"(int(condition))
      : "memory");
  return v;
}
