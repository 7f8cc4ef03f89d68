// 16 bytes from global memory that are read once: they leave the L1 cache to the weights.
// PTX ISA: "Data movement and conversion instructions: ld".
#pragma once
#include "../common/types.cuh"

__device__ __forceinline__ uint4 ld_global_once_128(const void* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}
