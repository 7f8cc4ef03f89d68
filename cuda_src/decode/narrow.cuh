// Numbers of 8 bits in a cache: int8, or e4m3 (float8_e4m3fn: 4 bits of exponent, 3 of mantissa, no
// infinities, the largest number 448). Both are rounded to the nearest, ties to even, and saturate.
// One at a time they are converted by integer arithmetic, as only sm_89 and newer have instructions
// for e4m3; widen() makes four of them float16, which has all numbers of either kind.
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

// Four numbers as float16, the first two in `low`.
template <int KIND, int ARCH>
__device__ __forceinline__ void widen(uint32_t four, uint32_t& low, uint32_t& high) {
  if constexpr (KIND == INT8) {
    // 0x6400 is 1024, whose last bit counts 1, so behind it a byte of x + 128 is 1152 + x.
    const uint32_t bytes = four ^ 0x80808080u;
    low = sub_f16x2(__byte_perm(bytes, 0x64646464u, 0x4140), 0x64806480u);
    high = sub_f16x2(__byte_perm(bytes, 0x64646464u, 0x4342), 0x64806480u);
  } else if constexpr (ARCH >= 90) {
    low = cvt_f16x2_e4m3x2(four), high = cvt_f16x2_e4m3x2_upper(four);
  } else {
    // The fields of x, at those of a float16, are x / 256. A NaN is 1.875, and the only number that
    // overflows when it is multiplied by 36000; infinity times 0 is a NaN.
    const auto place = [](uint32_t bytes) {
      const uint32_t parts = (bytes >> 1 & 0x3f803f80u) | (bytes & 0x80008000u);
      const uint32_t large = mul_f16x2(parts, 0x78657865u);
      return fma_f16x2(large, 0, mul_f16x2(parts, 0x5c005c00u));
    };
    low = place(__byte_perm(four, 0, 0x1404)), high = place(__byte_perm(four, 0, 0x3424));
  }
}
