// Captures: the arrays and numbers that a text of the caller's own reads (text.cuh). They are
// arguments of the kernel, in front of the others, so that their addresses and strides take no
// registers. Nobody writes them during the launch. The host lays them out in captures.py.
#pragma once
#include "../../common/convert.cuh"

// An element as the text sees it: floats are float, small integers int.
__device__ __forceinline__ float captured(float x) { return x; }
__device__ __forceinline__ float captured(half_t x) { return to_float(x); }
__device__ __forceinline__ float captured(bfloat16_t x) { return to_float(x); }
__device__ __forceinline__ int captured(int x) { return x; }
__device__ __forceinline__ int captured(uint8_t x) { return x; }
__device__ __forceinline__ int64_t captured(int64_t x) { return x; }
__device__ __forceinline__ bool captured(bool x) { return x; }

template <class I>
constexpr bool IS_INDEX = false;
template <>
constexpr bool IS_INDEX<int> = true;
template <>
constexpr bool IS_INDEX<int64_t> = true;
template <>
constexpr bool IS_INDEX<bool> = true;

// An array with RANK axes. A stride, in elements, has 32 bits, and its place 64.
template <typename T, int RANK>
struct Capture {
  const T* data;
  int strides[2 * RANK];

  template <class... Index>
  __device__ __forceinline__ auto operator()(Index... index) const {
    static_assert(sizeof...(Index) == RANK, "a capture must have as many indices as axes");
    static_assert((IS_INDEX<Index> && ...), "the indices of a capture must be integers");
    int64_t offset = 0;
    int axis = 0;
    ((offset += int64_t(int(index)) * strides[2 * axis++]), ...);
    return captured(data[offset]);
  }
};
template <typename T>
struct Capture<T, 0> {
  const T* data;

  __device__ __forceinline__ auto operator()() const { return captured(*data); }
};

// A number of the call.
template <typename T>
struct alignas(8) Number {
  T value;

  __device__ __forceinline__ T operator()() const { return value; }
};
