// CUDA C++ on a CPU: as much of the language as the kernels of attention use.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hardware.h"

#undef INT_MAX  // a constant of attention/fp16x3/rows.cuh

#define __device__
#define __host__
#define __global__ static
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __builtin_assume(x)
#define __CUDA_ARCH__ 900

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

// common/types.cuh defines these names, as other types of the same sizes.
#define uint8_t cuda_uint8_t
#define uint16_t cuda_uint16_t
#define uint32_t cuda_uint32_t
#define uint64_t cuda_uint64_t
#define int64_t cuda_int64_t

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename A, typename B>
constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(a) : T(b);
}
template <typename A, typename B>
constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) > T(b) ? T(a) : T(b);
}

inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __fmul_rn(float a, float b) { return a * b; }  // -ffp-contract=off
inline float __fdiv_rn(float a, float b) { return a / b; }  // -ffp-contract=off
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float rsqrtf(float x) { return 1.f / __builtin_sqrtf(x); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned __int128>(a) * b >> 64;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }

// Byte number i of the result is that of (b, a) which the hexadecimal digit i of s names.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const unsigned long long bytes = (unsigned long long)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> (s >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return emulator::shared_address(pointer);
}

template <typename T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}
template <typename T>
T atomicMax(T* address, T value) {
  const T before = *address;
  *address = max(before, value);
  return before;
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  const unsigned before = *address;
  *address = before >= last ? 0 : before + 1;
  return before;
}

namespace emulator {

template <typename T>
T shuffle(T value, int from) {
  struct Argument {
    T value;
    int from;
    T result;
  } argument = {value, from, value};
  collective("a shuffle", argument, [](Argument** lanes) {
    for (int i = 0; i < WARP; ++i) {
      if (lanes[i] && lanes[lanes[i]->from]) lanes[i]->result = lanes[lanes[i]->from]->value;
    }
  });
  return argument.result;
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet(0, blockDim.x); }
inline void __syncwarp() { emulator::ballot(false); }
inline unsigned __ballot_sync(unsigned, bool vote) { return emulator::ballot(vote); }
inline bool __any_sync(unsigned, bool vote) { return emulator::ballot(vote); }
inline bool __all_sync(unsigned, bool vote) { return !emulator::ballot(!vote); }
template <typename T>
T __shfl_sync(unsigned, T value, int from, int width = emulator::WARP) {
  return emulator::shuffle(value, emulator::lane() / width * width + from % width);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta) {
  const int lane = emulator::lane();
  return emulator::shuffle(value, lane < delta ? lane : lane - delta);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulator::shuffle(value, emulator::lane() ^ mask);
}
