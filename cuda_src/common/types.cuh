// Integer and 16-bit float types. NVRTC ships no <cstdint>, and the CUDA headers for half and
// bfloat16 are a second package that may be missing: a kernel here needs nothing but NVRTC.
#pragma once

#if __CUDA_ARCH__ < 700  // Pascal lacks the annotation; without it parameters may be copied
#undef __grid_constant__
#define __grid_constant__
#endif

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;

// Storage types have two bytes and no arithmetic, because kernels compute in float.
struct half_t {
  static constexpr bool IS_BFLOAT16 = false;
  uint16_t bits;
};
struct bfloat16_t {
  static constexpr bool IS_BFLOAT16 = true;
  uint16_t bits;
};

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr float FLOAT_MAX = 0x1.fffffep127f;
constexpr float QUIET_NAN = __builtin_bit_cast(float, 0x7fc00000);

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// A where the condition holds, else B.
template <bool CONDITION, class A, class B>
struct Choose {
  using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using Type = B;
};

// A CUtensorMap, encoded by the host (cupyflash/runtime/tensor_map.py); opaque to the kernel.
struct alignas(64) TensorMap {
  uint8_t bytes[128];
};
