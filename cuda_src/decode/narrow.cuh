// Numbers of 8 bits in a cache: int8, or e4m3 (float8_e4m3fn: 4 bits of exponent, 3 of mantissa, no
// infinities, the largest number 448). Both are rounded to the nearest, ties to even, and saturate.
// They are converted by integer arithmetic, as only sm_89 and newer have instructions for e4m3.
#pragma once
#include "../ptx/math.cuh"

// What a cache holds: numbers of the dtype of k, or of 8 bits.
constexpr int SAME = 0;
constexpr int INT8 = 1;
constexpr int E4M3 = 2;

constexpr float LARGEST_INT8 = 127.f;  // of what has a scale of its own
constexpr float LARGEST_E4M3 = 448.f;

// A float of 1.5 * 2^23 and more has an integer in its last bits, to which a sum is rounded.
constexpr float TO_INTEGER = 0x1.8p23f;

__device__ __forceinline__ uint8_t to_int8(float x) {
  const float saturated = fminf(fmaxf(x, -128.f), 127.f);
  return __float_as_uint(__fadd_rn(saturated, TO_INTEGER)) & 0xff;
}

__device__ __forceinline__ uint8_t to_e4m3(float x) {
  const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
  if (x != x) return sign | 0x7f;
  const float size = fminf(fabsf(x), LARGEST_E4M3);
  if (size < 0x1p-6f)  // a multiple of 2^-9; 8 of them are the smallest normal number
    return sign | (__float_as_uint(__fadd_rn(__fmul_rn(size, 512.f), TO_INTEGER)) & 0xff);
  const uint32_t of_size = __float_as_uint(size);
  const uint32_t rounded = of_size + 0x7ffffu + (of_size >> 20 & 1u);
  return sign | ((rounded >> 20) - ((127 - 7) << 3));
}

__device__ __forceinline__ float from_int8(uint32_t bits) { return float(int(bits << 24) >> 24); }

__device__ __forceinline__ float from_e4m3(uint32_t bits) {
  const float sign = bits & 0x80 ? -1.f : 1.f;
  const uint32_t size = bits & 0x7f;
  if (size == 0x7f) return QUIET_NAN;
  if (size < 8) return sign * 0x1p-9f * float(size);
  return sign * __uint_as_float((size << 20) + ((127 - 7) << 23));
}

template <int KIND>
__device__ __forceinline__ uint8_t to_narrow(float x) {
  return KIND == INT8 ? to_int8(x) : to_e4m3(x);
}

template <int KIND>
__device__ __forceinline__ float from_narrow(uint32_t bits) {
  return KIND == INT8 ? from_int8(bits) : from_e4m3(bits);
}
