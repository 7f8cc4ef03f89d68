// How the warps of the sm_80 backward kernel divide a product among themselves. The postprocess
// kernel needs the same grid, because it must know where the fragments of dQ lie.
#pragma once
#include "../../common/types.cuh"

// A ROWS x COLS product, divided into a grid of equal warp tiles. The grid is the one whose tiles
// are the most square, because a warp reads ROWS / rows + COLS / cols operand rows from shared
// memory. If two are equal it is the one with fewer rows a tile, because rows cost registers
// (operand A, lse_log2, delta).
template <int ROWS, int COLS, int NUM_WARPS>
struct WarpGrid {
  static constexpr bool fits(int rows) {
    return NUM_WARPS % rows == 0 && ROWS % (16 * rows) == 0 &&
           COLS % (16 * (NUM_WARPS / rows)) == 0;
  }
  static constexpr int perimeter(int rows) { return ROWS / rows + COLS / (NUM_WARPS / rows); }
  static constexpr int best() {
    int best_rows = 0;
    for (int rows = 1; rows <= NUM_WARPS; ++rows) {
      if (fits(rows) && (best_rows == 0 || perimeter(rows) <= perimeter(best_rows)))
        best_rows = rows;
    }
    return best_rows;
  }

  static constexpr int WARPS_M = best();
  static_assert(WARPS_M > 0, "no grid of whole 16 x 16 tiles for these warps");
  static constexpr int WARPS_N = NUM_WARPS / WARPS_M;
  static constexpr int TILE_ROWS = ROWS / WARPS_M;
  static constexpr int TILE_COLS = COLS / WARPS_N;
  static constexpr int M = TILE_ROWS / 16;
  static constexpr int N = TILE_COLS / 8;

  __device__ static int row() { return threadIdx.x / 32 / WARPS_N * TILE_ROWS; }
  __device__ static int col() { return threadIdx.x / 32 % WARPS_N * TILE_COLS; }
};

// Returns the place of a register of dQ in the dq_accum of its query tile. The order is warp by
// warp, in a warp register by register, and in a register lane by lane, so that every reduction of
// a warp goes to one line of 128 bytes.
template <class Grid>
__device__ __forceinline__ int64_t dq_fragment_offset(int m, int n, int i) {
  const int registers = Grid::M * Grid::N * 4;
  return (threadIdx.x / 32 * registers + (m * Grid::N + n) * 4 + i) * 32 + threadIdx.x % 32;
}
