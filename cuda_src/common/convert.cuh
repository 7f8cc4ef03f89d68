// Conversions between float and the storage types, for every architecture. bfloat16 is converted by
// integer arithmetic, because sm_75 and older have no instruction for it.
#pragma once
#include "../ptx/math.cuh"
#include "types.cuh"

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(half_t x) { return cvt_f32_f16(x.bits); }

__device__ __forceinline__ float to_float(bfloat16_t x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

template <typename T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

template <>
__device__ __forceinline__ half_t from_float<half_t>(float x) {
  return {cvt_f16_f32(x)};
}

// Round to nearest even: add half of the last kept bit, minus one when that bit is 0. A NaN must
// not be rounded (its mantissa could overflow to infinity), so it is replaced by the quiet NaN.
template <>
__device__ __forceinline__ bfloat16_t from_float<bfloat16_t>(float x) {
  const uint32_t bits = __float_as_uint(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<uint16_t>(x != x ? 0x7fffu : rounded >> 16)};
}
