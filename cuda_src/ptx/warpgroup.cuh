// Warpgroups (four consecutive warps) of sm_90 kernels: their roles, registers and named barriers.
// PTX ISA: "setmaxnreg", "elect.sync", "barrier".
#pragma once
#include "../common/types.cuh"

constexpr int WARPGROUP = 128;  // threads

// Returns x, which is the same in all lanes, in a way that lets the compiler know it: whatever
// derives from the result stays in uniform registers, and branches on it are uniform, as wgmma
// demands.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ __forceinline__ int warpgroup_index() { return uniform(threadIdx.x / WARPGROUP); }
__device__ __forceinline__ int warp_in_warpgroup() { return uniform(threadIdx.x / 32 % 4); }

// True in exactly one lane of the warp.
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

// setmaxnreg.dec gives registers of each thread back to the block, until the thread has N left;
// setmaxnreg.inc takes registers until the thread has N, and waits until enough have been given
// back. All warps of a warpgroup call one of them at the head of the branch of their role. N is a
// multiple of 8. The registers of all warpgroups together must not exceed those of the launch: the
// assembler does not check this sum, and with a larger one alloc_registers() would wait for ever.
template <int N>
__device__ __forceinline__ void dealloc_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void alloc_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Named barriers have the numbers 1 to 15 (0 is that of __syncthreads()). `threads` counts those
// that wait and those that only arrive. Barrier is an enum of the kernel, or int.
template <typename Barrier>
__device__ __forceinline__ void named_barrier_sync(Barrier barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}
template <typename Barrier>
__device__ __forceinline__ void named_barrier_arrive(Barrier barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}
