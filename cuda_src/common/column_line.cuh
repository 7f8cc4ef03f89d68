// A line of the columns of a product, slope * (column - MIDDLE), which wgmma adds by one more step
// of its sum: the slope comes from registers, and a tile of shared memory that never changes holds
// the numbers of the columns. Both are exact: a slope is the sum of three numbers of 16 bits.
#pragma once
#include "wg_gemm.cuh"

template <int N>
struct ColumnNumbers {
  using Tile = SmemTile<N, 32>;  // of which the step reads 16 columns
  static constexpr int BYTES = Tile::BYTES;
  static constexpr int MIDDLE = N / 2;
  static_assert(MIDDLE <= 256, "bfloat16 has these integers");

  // All threads of a block write the tile. wgmma may read it behind the next barrier.
  template <typename T>
  __device__ static void write(uint32_t smem) {
    for (int row = threadIdx.x; row < N; row += blockDim.x) {
      const float x = float(row - MIDDLE);
      const uint32_t pair = pack<T, 90>(x, x);
      st_shared_128(smem + Tile::offset(row, 0), make_uint4(pair, pack<T, 90>(x, 0.f), 0u, 0u));
      st_shared_128(smem + Tile::offset(row, 1), make_uint4(0u, 0u, 0u, 0u));
    }
    fence_async_proxy();
  }
};

// The registers of a lane in which operand A has the parts of a slope: those of its even rows and
// of its odd ones, which are the same.
template <typename T>
__device__ __forceinline__ uint32_t slope_operand(float slope) {
  const float first = to_float(from_float<T>(slope));
  const float second = to_float(from_float<T>(slope - first));
  const float third = slope - first - second;
  const int pair = threadIdx.x % 4;
  return pair == 0 ? pack<T, 90>(first, second) : pair == 1 ? pack<T, 90>(third, 0.f) : 0u;
}

// Issues acc = A B plus a line. `slope` must be pinned after the wait.
template <typename T, int K_STEPS, int N, class A, class B, class Numbers>
__device__ __forceinline__ void wg_gemm_and_line(float (&acc)[N][4], const A& a, const B& b,
                                                 uint32_t (&slope)[1][4], const Numbers& numbers) {
  pin(slope);
  wg_gemm<T, K_STEPS>(acc, a, b, OVERWRITE,
                      [&] { wgmma<T, 0>(acc, slope[0], numbers.at(0), ACCUMULATE); });
  pin(slope);
}
