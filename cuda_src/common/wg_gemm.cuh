// Matrix products of one warpgroup on wgmma. Operand A lies in a SmemTile or in registers, operand
// B in a SmemTile.
//
// An operand is named by how it lies in shared memory, as in warp_gemm.cuh: a row operand has the
// summation index k along the rows of the tile (contiguous), a column operand has k running down
// the rows. Both serve as A and as B.
#pragma once
#include "../ptx/math.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/wgmma.cuh"
#include "smem_tile.cuh"

// An operand of the rows of the tile from `row` on (a multiple of 8); k runs along them.
template <class Tile>
struct WgRowOperand {
  static constexpr int TRANSPOSED = 0;
  uint64_t descriptor;

  __device__ WgRowOperand(uint32_t smem, int row)
      : descriptor(wgmma_descriptor<Tile::ROW_BYTES>(smem + row * Tile::ROW_BYTES, 0)) {}

  // The descriptor of step k, which is 16 columns. Inside a column block it may simply be advanced,
  // because the hardware applies the swizzle after the addition.
  __device__ uint64_t at(int k) const {
    constexpr int STEPS = Tile::BLOCK_COLS / 16;
    return descriptor + (k / STEPS * Tile::BLOCK_BYTES + k % STEPS * 32) / 16;
  }
};

// An operand of the columns of the tile from a column block on; k runs down the rows.
template <class Tile>
struct WgColumnOperand {
  static constexpr int TRANSPOSED = 1;
  uint64_t descriptor;

  __device__ WgColumnOperand(uint32_t smem, int col_block)
      : descriptor(wgmma_descriptor<Tile::ROW_BYTES>(smem + col_block * Tile::BLOCK_BYTES,
                                                     Tile::BLOCK_BYTES)) {}

  // The descriptor of step k, which is 16 rows.
  __device__ uint64_t at(int k) const { return descriptor + k * 16 * Tile::ROW_BYTES / 16; }
};

// The argument `add` of wg_gemm.
constexpr bool OVERWRITE = false;
constexpr bool ACCUMULATE = true;

// The default of issue_more, which issues nothing.
struct NoMoreSteps {
  __device__ void operator()() const {}
};

// Issues acc = A B, or acc += A B if `add`, over K_STEPS steps of 16 as one group, to which
// issue_more() may add. The caller must wait for it with wgmma_wait() and then pin() the
// accumulator before using it. (pin() keeps the compiler from moving accesses to the registers into
// the time when the product owns them.)
template <typename T, int K_STEPS, int N, class A, class B, class IssueMore = NoMoreSteps>
__device__ __forceinline__ void wg_gemm(float (&acc)[N][4], const A& a, const B& b, bool add,
                                        IssueMore issue_more = {}) {
  pin(acc);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) {
    wgmma<T, A::TRANSPOSED, B::TRANSPOSED>(acc, a.at(k), b.at(k), k != 0 || add);
  }
  issue_more();
  wgmma_commit();
  pin(acc);
}

// wg_gemm() with A in registers, packed by wg_pack. They too must be pinned after the wait.
template <typename T, int K_STEPS, int N, class B>
__device__ __forceinline__ void wg_gemm(float (&acc)[N][4], uint32_t (&a)[K_STEPS][4], const B& b,
                                        bool add) {
  pin(a);
  pin(acc);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) {
    wgmma<T, B::TRANSPOSED>(acc, a[k], b.at(k), k != 0 || add);
  }
  wgmma_commit();
  pin(acc);
  pin(a);
}

template <int N>
__device__ __forceinline__ void set_zero(float (&acc)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] = 0.f;
  }
}

// Packs an accumulator as operand A of the next product, whose k runs over its columns.
template <typename T, int N>
__device__ __forceinline__ void wg_pack(uint32_t (&a)[N / 2][4], const float (&acc)[N][4]) {
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&pair)[4] = acc[2 * k + i / 2];
      a[k][i] = pack<T, 90>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
    }
  }
}

// Rounds a warp's accumulator to 16 bits and stores it in the tile at `smem`, in the 16 rows from
// `row` on.
template <class Tile, typename T, int N>
__device__ __forceinline__ void wg_store_tile(uint32_t smem, int row, const float (&acc)[N][4]) {
  uint32_t packed[N / 2][4];
  wg_pack<T>(packed, acc);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
    stmatrix_x4(smem + Tile::offset(row + lane % 16, 2 * k + lane / 16), packed[k]);
  }
}
