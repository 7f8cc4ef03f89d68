// Loads from global memory that bypass L1 or leave no line in it. PTX ISA: "Data movement and
// conversion instructions: ld", cache operators; "prefetch".
#pragma once
#include "../common/types.cuh"

#if __CUDA_ARCH__ < 700
#define NO_ALLOCATE ""  // Pascal has no such hint
#else
#define NO_ALLOCATE ".L1::no_allocate"
#endif

// Loads 16 bytes that are read once, by one thread, and that nobody writes during the launch (.nc).
__device__ __forceinline__ uint4 ld_global_stream_128(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// Loads 16 or 8 bytes that are read once and that this launch may have written.
__device__ __forceinline__ uint4 ld_global_once_128(const void* address) {
  uint4 v;
  asm volatile("ld.global" NO_ALLOCATE ".v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ uint2 ld_global_once_64(const void* address) {
  uint2 v;
  asm volatile("ld.global" NO_ALLOCATE ".v2.b32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(address));
  return v;
}

// Loads of data that other multiprocessors have written in the same launch: .cg reads it from L2,
// because L1 may hold an older value.
__device__ __forceinline__ uint4 ld_global_cg_128(const void* address) {
  uint4 v;
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ float2 ld_global_cg(const float2* address) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
               : "=f"(v.x), "=f"(v.y)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ float ld_global_cg(const float* address) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint64_t ld_global_cg(const uint64_t* address) {
  uint64_t v;
  asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}

// Brings the line of 128 bytes around the address into L2, without waiting for it.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
