// Stores of accumulator fragments to rows in global memory, without a detour through shared memory.
#pragma once
#include "../ptx/math.cuh"
#include "../ptx/opaque.cuh"

// Transposes the 4 x 4 words that the lanes of a quad hold: word j of lane c becomes the former
// word c of lane j.
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4]) {
#pragma unroll
  for (int mask = 1; mask <= 2; mask *= 2) {
    const bool upper = threadIdx.x & mask;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & mask) continue;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? w[j] : w[j + mask], mask);
      (upper ? w[j] : w[j + mask]) = received;
    }
  }
}

// Stores 16 rows of a warp, which lie in fragments as in ptx/mma.cuh. A lane holds two of every
// eight columns. After an exchange within its quad it holds all eight of one group, so that it
// stores 16 bytes at once and a warp writes whole sectors. `out` points to the first row, and
// `rows` of them exist.
template <typename T, int N>
__device__ __forceinline__ void store_rows(T* out, int64_t row_stride, const float (&acc)[N][4],
                                           int rows, int head_dim) {
  static_assert(N % 4 == 0, "a quad exchanges four columns of eight");
  // The lane is read anew and the stride is opaque, because in a persistent kernel the compiler
  // would keep the multiples of the stride in registers from tile to tile.
  const int lane = fresh_thread_index() % 32;
  row_stride = opaque(row_stride);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = pack<T, 90>(acc[n + j][2 * half], acc[n + j][2 * half + 1]);
      }
      quad_transpose(words);
      const int column = (n + lane % 4) * 8;
      if (row < rows && column < head_dim) {
        *reinterpret_cast<uint4*>(out + row * row_stride + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// Stores such a fragment in float32, all columns of it; a quad writes a sector of 32 bytes.
template <int N>
__device__ __forceinline__ void store_float_rows(float* out, int row_stride,
                                                 const float (&acc)[N][4], int rows) {
  const int lane = fresh_thread_index() % 32;
  row_stride = opaque(row_stride);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    if (row >= rows) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      *reinterpret_cast<float2*>(out + int64_t(row) * row_stride + n * 8 + lane % 4 * 2) =
          make_float2(acc[n][2 * half], acc[n][2 * half + 1]);
    }
  }
}
