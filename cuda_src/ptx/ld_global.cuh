// 16 bytes from global memory. PTX ISA: "Data movement and conversion instructions: ld".
#pragma once
#include "../common/types.cuh"

// What is read once and by one thread only: it goes past L1.
__device__ __forceinline__ uint4 ld_global_stream_128(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// What other blocks of this launch have written.
__device__ __forceinline__ float4 ld_global_cg_128(const float* address) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// Brings the line of an address to the L2.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
