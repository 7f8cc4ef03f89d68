// Stores of matrix fragments from registers to shared memory (sm_90), and their transposition
// (sm_75).
// PTX ISA: "Warp-level matrix store instruction: stmatrix", "Warp-level matrix transpose
// instruction: movmatrix". The counterpart of ldmatrix.cuh.
#pragma once
#include "../common/types.cuh"

// Stores four 8x8 matrices of 16-bit elements; lane 8 i + j gives the address of row j of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Stores two matrices; lane 8 i + j, below 16, gives the address of row j of matrix i.
__device__ __forceinline__ void stmatrix_x2(uint32_t address, const uint32_t (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]),
               "r"(r[1])
               : "memory");
}

// Stores the transposes of the four matrices.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements across the lanes of a warp: lane 4 g + c holds row g,
// columns 2 c and 2 c + 1, of the matrix and of the result.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t r) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
  return transposed;
}

__device__ __forceinline__ void st_shared_128(uint32_t address, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}
