// A tile of 16-bit elements in shared memory, for cp.async, TMA, ldmatrix, mma.sync and wgmma.
//
// The tile is cut into column blocks of 64 (or 32) elements; a row of a block is 128 (64) bytes,
// and the 16-byte chunks of a row are permuted by the row number, so that eight consecutive rows
// hold the same chunk in eight different bank groups: copies, ldmatrix and stores are free of
// conflicts. With 64 columns this is the 128-byte swizzle of TMA and wgmma.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/math.cuh"
#include "../ptx/opaque.cuh"

template <int ROWS_, int COLS_>
struct SmemTile {
  static_assert(ROWS_ % 8 == 0 && COLS_ % 32 == 0, "rows come in eights, columns in 32s");
  static constexpr int ROWS = ROWS_;
  static constexpr int COLS = COLS_;
  static constexpr int BYTES = ROWS * COLS * 2;
  static constexpr int BLOCK_COLS = COLS % 64 == 0 ? 64 : 32;
  static constexpr int NUM_BLOCKS = COLS / BLOCK_COLS;
  static constexpr int ROW_BYTES = BLOCK_COLS * 2;
  static constexpr int ROW_CHUNKS = BLOCK_COLS / 8;
  static constexpr int BLOCK_BYTES = ROWS * ROW_BYTES;

  // The byte offset of chunk `chunk` (8 elements) of row `row`.
  __device__ static uint32_t offset(int row, int chunk) {
    const int key = BLOCK_COLS == 64 ? row % 8 : row / 2 % 4;
    return (chunk / ROW_CHUNKS) * (ROWS * ROW_BYTES) + row * ROW_BYTES +
           ((chunk % ROW_CHUNKS) ^ key) * 16;
  }

  // The address of (row + rows, chunk + chunks) from that of (row, chunk). rows must be a multiple
  // of 8, and chunk and chunks must have no bit in common (below ROW_CHUNKS). Then it takes one XOR
  // with a constant, and the rest is the immediate offset of the instruction that uses the address.
  __device__ static uint32_t advance(uint32_t address, int rows, int chunks) {
    return (address ^ (chunks % ROW_CHUNKS * 16)) + (chunks / ROW_CHUNKS * ROWS + rows) * ROW_BYTES;
  }
};

// Copies rows [0, valid_rows) x columns [0, head_dim) of a global tile. The rest of the shared tile
// becomes zero, so that nothing outside the valid region (NaN, say) can reach a product.
template <class Tile, int NUM_THREADS, int ARCH, typename T>
__device__ __forceinline__ void load_tile(uint32_t smem, const T* gmem, int64_t row_stride,
                                          int valid_rows, int head_dim) {
  constexpr int ROWS_PER_PASS = NUM_THREADS / Tile::ROW_CHUNKS;
  static_assert(ROWS_PER_PASS % 8 == 0, "the swizzle of a thread must be the same in every pass");
  const int thread = fresh_thread_index();
  const int chunk = thread % Tile::ROW_CHUNKS;
  const int first_row = thread / Tile::ROW_CHUNKS;
  const uint32_t dst = smem + Tile::offset(first_row, chunk);
  const T* src = gmem + first_row * row_stride + chunk * 8;
#pragma unroll
  for (int pass = 0; pass < ceil_div(Tile::ROWS, ROWS_PER_PASS); ++pass) {
    const int row = first_row + pass * ROWS_PER_PASS;
    if (Tile::ROWS % ROWS_PER_PASS != 0 && row >= Tile::ROWS) break;
#pragma unroll
    for (int block = 0; block < Tile::NUM_BLOCKS; ++block) {
      const bool valid = row < valid_rows && block * Tile::BLOCK_COLS + chunk * 8 < head_dim;
      const uint32_t to = dst + (block * Tile::ROWS + pass * ROWS_PER_PASS) * Tile::ROW_BYTES;
      const T* from = src + block * Tile::BLOCK_COLS;
      if constexpr (ARCH >= 80) {
        cp_async_16(to, from, valid);
      } else {
        copy_16(to, from, valid);
      }
    }
    src += ROWS_PER_PASS * row_stride;
  }
}

// Stores rows [0, valid_rows) x columns [0, head_dim) of a shared tile to global memory, 16 bytes a
// lane.
template <class Tile, int NUM_THREADS, typename T>
__device__ __forceinline__ void store_tile(T* gmem, int64_t row_stride, uint32_t smem,
                                           int valid_rows, int head_dim) {
  constexpr int ROWS_PER_PASS = NUM_THREADS / Tile::ROW_CHUNKS;
  const int thread = fresh_thread_index();
  const int chunk = thread % Tile::ROW_CHUNKS;
  const int first_row = thread / Tile::ROW_CHUNKS;
  for (int row = first_row; row < min(Tile::ROWS, valid_rows); row += ROWS_PER_PASS) {
#pragma unroll
    for (int block = 0; block < Tile::NUM_BLOCKS; ++block) {
      const int col = block * Tile::BLOCK_COLS + chunk * 8;
      if (col < head_dim) {
        *reinterpret_cast<uint4*>(gmem + row * row_stride + col) =
            ld_shared_128(smem + Tile::offset(row, col / 8));
      }
    }
  }
}

// Rounds a warp's accumulators to 16 bits and stores them at rows [row, row + 16 * M) and columns
// [col, col + 8 * N) of the tile.
template <class Tile, typename T, int ARCH, int M, int N>
__device__ __forceinline__ void store_fragments(uint32_t smem, int row, int col,
                                                const float (&acc)[M][N][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        st_shared_32(
            smem + Tile::offset(row + m * 16 + half * 8 + lane / 4, col / 8 + n) + lane % 4 * 4,
            pack<T, ARCH>(acc[m][n][2 * half], acc[m][n][2 * half + 1]));
      }
    }
  }
}
