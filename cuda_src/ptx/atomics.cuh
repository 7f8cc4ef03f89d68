// Reductions and flags in global memory. A flag is a counter that orders memory: a thread that
// counts with .release publishes its earlier writes, and a thread that reads the new value with
// .acquire sees them.
//
// PTX ISA: "Parallel synchronization instructions: red", "Memory consistency model".
#pragma once
#include "../common/types.cuh"

// Adds to global memory and returns nothing, so that the thread does not wait for memory.
__device__ __forceinline__ void red_add(float* address, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

// Adds four neighbouring floats; the address is a multiple of 16 bytes (sm_90).
__device__ __forceinline__ void red_add(float* address, const float (&v)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}

// Adds to global memory and returns what was there.
__device__ __forceinline__ uint64_t atom_add(uint64_t* address, uint64_t value) {
  uint64_t before;
  asm volatile("atom.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(address), "l"(value)
               : "memory");
  return before;
}

// Reads a flag. Whatever was written before the release of the value that it returns is visible to
// this thread afterwards (sm_70).
__device__ __forceinline__ int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Waits until *flag == value. Whatever was written before the release of this value is visible
// afterwards (sm_70).
__device__ __forceinline__ void wait_flag(const int* flag, int value) {
  while (load_acquire(flag) != value) {
  }
}

// wait_flag() by plain loads and a fence. It is slower, but takes two registers fewer, and
// flash_bwd_sm80 has none to spare.
__device__ __forceinline__ void wait_flag_fenced(const int* flag, int value) {
  while (*static_cast<const volatile int*>(flag) != value) {
  }
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// Adds 1 to a flag, and publishes this thread's earlier writes and those of the threads that it has
// synchronised with.
__device__ __forceinline__ void release_flag(int* flag) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(flag) : "memory");
}

// release_flag() for a flag that wraps to 0 at count number `last` + 1.
__device__ __forceinline__ void release_flag_wrapping(int* flag, int last) {
  asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(flag), "r"(last) : "memory");
}

// Counts like release_flag_wrapping(), but publishes no earlier writes.
__device__ __forceinline__ void count_wrapping(int* flag, int last) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(flag), "r"(last) : "memory");
}

// Counts like release_flag_wrapping() and returns the number of earlier counts. Whatever was
// written before those counts is visible afterwards. It uses fences, because GPUs older than sm_70
// have neither .release nor .acquire.
__device__ __forceinline__ int count_in(int* flag, int last) {
  __threadfence();
  const int earlier = atomicInc(reinterpret_cast<unsigned*>(flag), last);
  __threadfence();
  return earlier;
}

// count_in() in one instruction, without fences (sm_70).
__device__ __forceinline__ int count_acq_rel(int* flag, int last) {
  int earlier;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(earlier)
               : "l"(flag), "r"(last)
               : "memory");
  return earlier;
}
