// Captures: the arrays and numbers that a text of the caller's own reads (text.cuh). They are
// arguments of the kernel, in front of the others, so that their addresses and strides take no
// registers. Nobody writes them during the launch. The host lays them out in captures.py.
#pragma once
#include "../../common/convert.cuh"
#include "../../ptx/opaque.cuh"
#include "place.cuh"

// An element as the text sees it: floats are float, small integers int.
__device__ __forceinline__ float captured(float x) { return x; }
__device__ __forceinline__ float captured(half_t x) { return to_float(x); }
__device__ __forceinline__ float captured(bfloat16_t x) { return to_float(x); }
__device__ __forceinline__ int captured(int x) { return x; }
__device__ __forceinline__ int captured(uint8_t x) { return x; }
__device__ __forceinline__ int64_t captured(int64_t x) { return x; }
__device__ __forceinline__ bool captured(bool x) { return x; }

template <typename T>
__device__ __forceinline__ T loaded(const unsigned char* address) {
  return *reinterpret_cast<const T*>(address);
}
// Any byte but 0 is true, as torch and NumPy read it; a bool of C++ may only be 0 or 1.
template <>
__device__ __forceinline__ bool loaded<bool>(const unsigned char* address) {
  return *address != 0;
}

template <class I>
constexpr bool IS_INDEX = false;
template <>
constexpr bool IS_INDEX<int> = true;
template <>
constexpr bool IS_INDEX<int64_t> = true;
template <>
constexpr bool IS_INDEX<bool> = true;
template <>
constexpr bool IS_INDEX<text::Place> = true;

// The element of an array whose strides are in bytes, so that its address takes one multiply-add
// for each axis. Keys and queries usually stand on the last axis, whose stride has 32 bits
// (score_text/checks.py).
template <typename T, int RANK, class... Index>
__device__ __forceinline__ T element(const T* data, const int64_t (&strides)[RANK],
                                     Index... index) {
  static_assert(sizeof...(Index) == RANK, "a capture must have as many indices as axes");
  static_assert((IS_INDEX<Index> && ...), "the indices of a capture must be integers");
  const unsigned char* address = reinterpret_cast<const unsigned char*>(data);
  int axis = 0;
  const auto move = [&](int i) {
    const int64_t stride = strides[axis];
    address = axis == RANK - 1 ? opaque_step(address, i, int(stride)) : address + i * stride;
  };
  const auto move_along = [&](auto index) {
    if constexpr (text::IS_PLACE<decltype(index)>) {
      move(index.first);
      move(index.step);
    } else {
      move(int(index));
    }
    ++axis;
  };
  (move_along(index), ...);
  return loaded<T>(address);
}

// An array with RANK axes.
template <typename T, int RANK>
struct Capture {
  const T* data;
  int64_t strides[RANK];

  template <class... Index>
  __device__ __forceinline__ auto operator()(Index... index) const {
    return captured(element(data, strides, index...));
  }
};
template <typename T>
struct Capture<T, 0> {
  const T* data;

  __device__ __forceinline__ auto operator()() const {
    return captured(loaded<T>(reinterpret_cast<const unsigned char*>(data)));
  }
};

// A number of the call.
template <typename T>
struct alignas(8) Number {
  T value;

  __device__ __forceinline__ T operator()() const { return value; }
};
