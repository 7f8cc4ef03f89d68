// Four consecutive warps: roles, registers and named barriers of sm_90 kernels.
// PTX ISA: "setmaxnreg", "elect.sync", "barrier".
#pragma once
#include "../common/types.cuh"

constexpr int WARPGROUP = 128;  // threads

// A value that is the same in all lanes, and known to be: what derives from it stays in uniform
// registers, and branches on it are uniform, as wgmma demands.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ __forceinline__ int warpgroup_index() { return uniform(threadIdx.x / WARPGROUP); }
__device__ __forceinline__ int warp_in_warpgroup() { return uniform(threadIdx.x / 32 % 4); }

// True in one lane of the warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected;
}

// setmaxnreg: gives registers of each thread back to the block until N are left, or takes them from
// it until there are N (waiting until there are enough). All warps of the warpgroup call it, at the
// head of the branch of their role; N is a multiple of 8.
template <int N>
__device__ __forceinline__ void dealloc_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void alloc_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Barrier 1..15 (0 is __syncthreads) among `threads`, those that wait and those that only arrive.
// Barrier is an enum of the kernel's, or int.
template <typename Barrier>
__device__ __forceinline__ void named_barrier_sync(Barrier barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}
template <typename Barrier>
__device__ __forceinline__ void named_barrier_arrive(Barrier barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}
