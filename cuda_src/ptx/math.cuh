// Approximate arithmetic and 16-bit packing in single instructions. The division and logf of C++
// have slow paths in a function call, and its calling convention takes registers from the loops.
#pragma once
#include "../common/types.cuh"

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float PI = 3.1415926535897932f;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// sin_approx() and cos_approx() have an absolute error of at most 2^-20.9 between -pi and pi.
__device__ __forceinline__ float sin_approx(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float cos_approx(float x) {
  float y;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x * 2^exponent) for a positive, normal x. lg2.approx has an absolute error of 2^-22 for
// arguments between 0.5 and 2, but only a relative error of 2^-22 for large ones. So it gets the
// mantissa alone, and the exponent, which is an exact integer, is added to its result.
__device__ __forceinline__ float log2_accurate(float x, int exponent = 0) {
  const int bits = __float_as_int(x);
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__int_as_float((bits & 0x7fffff) | 0x3f800000)));
  return y + float((bits >> 23) - 127 + exponent);
}

// log2_accurate() of a sum of weights, except that a NaN stays a NaN.
__device__ __forceinline__ float log2_of_sum(float x) { return x == x ? log2_accurate(x) : x; }

// Conversions from and to the bits of a float16.
__device__ __forceinline__ float cvt_f32_f16(uint16_t bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}
__device__ __forceinline__ uint16_t cvt_f16_f32(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// The full 64-bit product of two 32-bit numbers.
__device__ __forceinline__ uint64_t mul_wide(uint32_t a, uint32_t b) {
  uint64_t c;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(c) : "r"(a), "r"(b));
  return c;
}

// Arithmetic of two 16-bit numbers that are packed in one register. A NaN stays a NaN.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t min_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t min_f16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

__device__ __forceinline__ uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// Two e4m3 numbers as float16, which has all of them, and those in the upper half of a word.
// sm_89 and newer.
__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2(uint16_t bits) {
  uint32_t r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(bits));
  return r;
}
__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2_upper(uint32_t bits) {
  uint32_t r;
  asm("{\n"
      ".reg .b16 lower, upper;\n"
      "mov.b32 {lower, upper}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, upper;\n"
      "}"
      : "=r"(r)
      : "r"(bits));
  return r;
}

// tanh with an absolute error near 1e-7, for a score that is multiplied by the cap afterwards;
// tanh.approx (2^-11) would cost more accuracy than float16 scores have.
__device__ __forceinline__ float tanh_exp2(float x) {
  return 1.f - 2.f * rcp_approx(1.f + exp2_approx(2.f * LOG2E * x));
}

// tanh_exp2() of x / (2 log2(e)). NVRTC would write 2 * y as y + y, and not contract the two. In
// the backward of a softcap as text this order of instructions spills 136 bytes, so that has the
// other.
__device__ __forceinline__ float tanh_of_log2(float x) {
  return __fmaf_rn(-2.f, rcp_approx(1.f + exp2_approx(x)), 1.f);
}

// The smaller and the larger number, and NaN if either is NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
  if constexpr (__CUDA_ARCH__ >= 800) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  } else {
    return !(a >= b) && b == b ? a : b;
  }
}
__device__ __forceinline__ float max_nan(float a, float b) {
  if constexpr (__CUDA_ARCH__ >= 800) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  } else {
    return !(a <= b) && b == b ? a : b;
  }
}

// Clamps x to [-limit, limit]. A NaN stays a NaN.
__device__ __forceinline__ float clamp_nan(float x, float limit) {
  return max_nan(min_nan(x, limit), -limit);
}

// Rounds two floats to 16 bits and packs them into one register, `lo` in the low half.
template <typename T, int ARCH>
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  uint32_t r;
  if constexpr (T::IS_BFLOAT16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  } else if constexpr (ARCH >= 80) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  } else {
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
        : "=r"(r)
        : "f"(lo), "f"(hi));
  }
  return r;
}
