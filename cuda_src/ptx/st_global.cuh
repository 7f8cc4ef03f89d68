// Stores of 16 bytes to global memory. PTX ISA: "Data movement and conversion instructions: st".
#pragma once
#include "../common/types.cuh"

__device__ __forceinline__ void st_global_128(void* address, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// st_global_128() for data that is not read again soon: L2 evicts it first (.cs).
__device__ __forceinline__ void st_global_stream_128(void* address, uint4 v) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// st_global_128() if `valid`, by a predicate instead of a branch.
__device__ __forceinline__ void st_global_128(void* address, uint4 v, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.b32 valid, %5, 0;\n"
      "@valid st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(int(valid))
      : "memory");
}
