// A term of the columns of a product, which wgmma adds by one more step of its sum: the factor of a
// row comes from registers, and a tile of shared memory holds the numbers of the columns. A float
// is the sum of three numbers of 16 bits.
#pragma once
#include "wg_gemm.cuh"

// The numbers of a line, slope * (column - MIDDLE), in a tile that never changes. Both factors are
// exact.
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

  __device__ static auto operand(uint32_t smem, int) {
    return WgRowOperand<Tile>(uniform(smem), 0);
  }
};

// A float as a sum of numbers of 16 bits.
template <typename T>
struct SumOfThree {
  float first, second, third;

  __device__ explicit SumOfThree(float x)
      : first(to_float(from_float<T>(x))),
        second(to_float(from_float<T>(x - first))),
        third(x - first - second) {}
};

// The registers of a lane in which operand A has the parts of a slope: those of its even rows and
// of its odd ones, which are the same.
template <typename T>
__device__ __forceinline__ uint32_t slope_operand(float slope) {
  const SumOfThree<T> x(slope);
  const int pair = threadIdx.x % 4;
  return pair == 0 ? pack<T, 90>(x.first, x.second) : pair == 1 ? pack<T, 90>(x.third, 0.f) : 0u;
}

// The numbers of terms that each stage of the operand B has anew. The step adds factor * term as
// six products of their parts; those that it leaves out are below 2^-22 of the whole.
template <int N, int STAGES>
struct ColumnTerms {
  using Tile = SmemTile<N, 32>;  // of which the step reads 16 columns
  static constexpr int BYTES = STAGES * Tile::BYTES;
  // A term and a factor below the limit have a product that is finite. No bfloat16 is above MOST.
  static constexpr float LIMIT = 0x1p60f, MOST = 0x1.fep127f;

  // All threads of a block clear the tiles.
  template <typename T>
  __device__ static void write(uint32_t smem) {
    for (int chunk = threadIdx.x; chunk < BYTES / 16; chunk += blockDim.x)
      st_shared_128(smem + chunk * 16, make_uint4(0u, 0u, 0u, 0u));
    fence_async_proxy();
  }

  // Stores the term of one column of a stage, by one thread. The parts of a term are not rounded
  // but cut off, which takes a mask.
  __device__ static void store(uint32_t smem, int stage, int column, float term) {
    const float first = cut(term), second = cut(term - first), third = term - first - second;
    const uint32_t pair = upper_halves(first, second);
    st_shared_128(smem + stage * Tile::BYTES + Tile::offset(column, 0),
                  make_uint4(pair, upper_halves(third, first), pair, 0u));
  }
  // The register of a lane in which operand A has the parts of the factor of a row.
  __device__ static uint32_t row_operand(float factor) {
    const SumOfThree<bfloat16_t> x(factor);
    const int pair = threadIdx.x % 4;
    const float low = pair == 2 ? x.third : x.first, high = pair == 0 ? x.first : x.second;
    return pair == 3 ? 0u : pack<bfloat16_t, 90>(low, high);
  }

  __device__ static auto operand(uint32_t smem, int stage) {
    return WgRowOperand<Tile>(smem + uniform(stage) * Tile::BYTES, 0);
  }

 private:
  // The first eight binary digits of a float, and two such numbers as bfloat16.
  __device__ static float cut(float x) { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }
  __device__ static uint32_t upper_halves(float low, float high) {
    return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
  }
};

// Issues acc = A B plus a term, whose operands have the dtype TermT. `factors` must be pinned after
// the wait.
template <typename T, typename TermT, int K_STEPS, int N, class A, class B, class Numbers>
__device__ __forceinline__ void wg_gemm_and_term(float (&acc)[N][4], const A& a, const B& b,
                                                 uint32_t (&factors)[1][4],
                                                 const Numbers& numbers) {
  pin(factors);
  wg_gemm<T, K_STEPS>(acc, a, b, OVERWRITE,
                      [&] { wgmma<TermT, 0>(acc, factors[0], numbers.at(0), ACCUMULATE); });
  pin(factors);
}
