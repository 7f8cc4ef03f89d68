// Neighbouring values in 32-bit registers, which are loaded and stored 16 bytes at a time, or a
// single value. 16-bit values that live in registers for long should stay in pairs: Words keeps
// them so, while the compiler gives each value of a Pack a register of its own.
#pragma once
#include "../ptx/ld_global.cuh"
#include "../ptx/math.cuh"
#include "../ptx/st_global.cuh"
#include "convert.cuh"

template <typename T, int N>
struct Words {
  static constexpr int COUNT = ceil_div(N * int(sizeof(T)), 4);
  static_assert(N == 1 || COUNT == 2 || COUNT % 4 == 0, "one value, 8 bytes, or 16 bytes n times");
  uint32_t words[COUNT];

  __device__ float at(int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else if constexpr (T::IS_BFLOAT16) {
      return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    } else {
      return to_float(half_t{uint16_t(i % 2 ? words[i / 2] >> 16 : words[i / 2])});
    }
  }
};

// `data` is aligned to 16 bytes, or to the size of all values if that is less. With ONCE the loads
// allocate no line in L1, as nobody reads it again.
template <int N, bool ONCE = false, typename T>
__device__ __forceinline__ Words<T, N> load_words(const T* data) {
  Words<T, N> result;
  if constexpr (Words<T, N>::COUNT == 2) {
    const uint2* address = reinterpret_cast<const uint2*>(data);
    const uint2 v = ONCE ? ld_global_once_64(address) : *address;
    result.words[0] = v.x, result.words[1] = v.y;
  } else if constexpr (N > 1) {
#pragma unroll
    for (int i = 0; i < Words<T, N>::COUNT / 4; ++i) {
      const uint4* address = reinterpret_cast<const uint4*>(data) + i;
      const uint4 v = ONCE ? ld_global_once_128(address) : *address;
      result.words[4 * i] = v.x, result.words[4 * i + 1] = v.y;
      result.words[4 * i + 2] = v.z, result.words[4 * i + 3] = v.w;
    }
  } else if constexpr (sizeof(T) == 4) {
    result.words[0] = __float_as_uint(*data);
  } else {
    result.words[0] = data->bits;
  }
  return result;
}

template <typename T, int N>
__device__ __forceinline__ uint4 bits_of(const Words<T, N>& v) {
  static_assert(Words<T, N>::COUNT == 4, "16 bytes");
  return make_uint4(v.words[0], v.words[1], v.words[2], v.words[3]);
}

// With STREAM the values are not read again soon, and L2 evicts them first.
template <int N, bool STREAM = false, typename T>
__device__ __forceinline__ void store_words(T* data, const Words<T, N>& v) {
  if constexpr (N > 1) {
    static_assert(Words<T, N>::COUNT % 4 == 0, "16 bytes n times");
#pragma unroll
    for (int i = 0; i < Words<T, N>::COUNT / 4; ++i) {
      const uint32_t* words = v.words + 4 * i;
      const uint4 bits = make_uint4(words[0], words[1], words[2], words[3]);
      uint4* address = reinterpret_cast<uint4*>(data) + i;
      STREAM ? st_global_stream_128(address, bits) : st_global_128(address, bits);
    }
  } else if constexpr (sizeof(T) == 4) {
    *data = __uint_as_float(v.words[0]);
  } else {
    *data = {uint16_t(v.words[0])};
  }
}

// Rounds floats to T. Two bfloat16 are rounded by one instruction where the GPU has it: the integer
// arithmetic of from_float() would cost more than all the rest of a norm.
template <typename T, int N>
__device__ __forceinline__ Words<T, N> round_words(const float (&values)[N]) {
  constexpr int ARCH = __CUDA_ARCH__ / 10;
  Words<T, N> result;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) result.words[i] = __float_as_uint(values[i]);
  } else if constexpr (N == 1) {
    result.words[0] = from_float<T>(values[0]).bits;
  } else if constexpr (!T::IS_BFLOAT16 || ARCH >= 80) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
      result.words[i] = pack<T, ARCH>(values[2 * i], values[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const uint32_t low = from_float<T>(values[2 * i]).bits;
      result.words[i] = low | uint32_t(from_float<T>(values[2 * i + 1]).bits) << 16;
    }
  }
  return result;
}
