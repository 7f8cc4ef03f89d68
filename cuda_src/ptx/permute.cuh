// PTX ISA: "prmt", in its default mode, which picks any four bytes of two registers.
#pragma once
#include "../common/types.cuh"

// Each byte of the result is a sign, eight times: that of the byte of (second, first) whose number
// plus 8 is the hexadecimal digit of `bytes` in its place. __byte_perm() lacks the signs.
__device__ __forceinline__ uint32_t repeat_signs(uint32_t first, uint32_t second, uint32_t bytes) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(first), "r"(second), "r"(bytes));
  return r;
}
