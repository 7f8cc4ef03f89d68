// Functions that hide from the compiler how a value was computed. They cost no instruction (except
// fresh_thread_index(), which reads a register) and save registers.
#pragma once
#include "../common/types.cuh"

// For strides. The compiler would compute all multiples of a stride before the loops that use them
// and keep each in two registers. It cannot move the multiples of an opaque stride out of the loop,
// so it computes them where they are used.
__device__ __forceinline__ int64_t opaque(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// For pointers to global memory. Constant distances from an opaque pointer become immediate offsets
// of the loads and stores.
template <typename T>
__device__ __forceinline__ T* opaque(T* x) {
  asm volatile("" : "+l"(x));
  __builtin_assume(__isGlobal(x));
  return x;
}

// The pointer to global memory that lies index * stride bytes further. The compiler would turn sums
// of products of one stride into products of sums, which take more instructions.
__device__ __forceinline__ const unsigned char* opaque_step(const unsigned char* from, int index,
                                                            int stride) {
  const unsigned char* to;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(to) : "r"(index), "r"(stride), "l"(from));
  __builtin_assume(__isGlobal(to));
  return to;
}

// For floats. A result that was computed from the value before is computed again from the opaque
// copy, instead of being kept in a register.
__device__ __forceinline__ float opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// The bits of a float in an accumulator of wgmma. After __float_as_uint(), NVRTC 13.4 and later
// keep the accumulator as integers from one step of a loop to the next, and copy it for the
// product. ptxas finds no registers for that, and serialises all products of the kernel (C7511).
__device__ __forceinline__ uint32_t opaque_bits(float x) {
  uint32_t bits;
  asm volatile("mov.b32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// Reads threadIdx.x anew. Whatever derives from it is then computed where it is needed; otherwise
// common subexpression elimination would keep it in registers through the main loop.
__device__ __forceinline__ int fresh_thread_index() {
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  return tid;
}

// gridDim.x, read anew.
__device__ __forceinline__ uint32_t fresh_grid_size() {
  uint32_t blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

// Makes the compiler load again what it would keep in registers: nothing that memory holds is known
// behind this.
__device__ __forceinline__ void forget_registers() { asm volatile("" ::: "memory"); }
