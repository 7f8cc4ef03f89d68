// Reductions and flags in global memory.
// PTX ISA: "Parallel synchronization instructions: red", "Memory consistency model".
#pragma once
#include "../common/types.cuh"

__device__ __forceinline__ void red_add(float* address, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

// Four at once, 16 bytes aligned (sm_90).
__device__ __forceinline__ void red_add(float* address, const float (&v)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}

// What was written before the release of this value is visible (sm_70).
__device__ __forceinline__ int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Waits until *flag == value; what was written before its release is visible then (sm_70).
__device__ __forceinline__ void wait_flag(const int* flag, int value) {
  while (load_acquire(flag) != value) {
  }
}

// The same by plain loads and a fence: slower, but two registers less, which flash_bwd_sm80 lacks.
__device__ __forceinline__ void wait_flag_fenced(const int* flag, int value) {
  while (*static_cast<const volatile int*>(flag) != value) {
  }
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// Makes this thread's earlier writes, and those it has synchronised with, visible with the flag.
__device__ __forceinline__ void release_flag(int* flag) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(flag) : "memory");
}

// The same with any number.
__device__ __forceinline__ void red_add_release(uint32_t* address, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// The same for a flag that is 0 again after `last` + 1 counts.
__device__ __forceinline__ void release_flag_wrapping(int* flag, int last) {
  asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(flag), "r"(last) : "memory");
}

// One more count, which tells nothing about earlier writes.
__device__ __forceinline__ void count_wrapping(int* flag, int last) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(flag), "r"(last) : "memory");
}

// Counts like `release_flag_wrapping`, sees what was written before all earlier counts, and returns
// how many they were. By fences, for GPUs older than sm_70.
__device__ __forceinline__ int count_in(int* flag, int last) {
  __threadfence();
  const int earlier = atomicInc(reinterpret_cast<unsigned*>(flag), last);
  __threadfence();
  return earlier;
}
