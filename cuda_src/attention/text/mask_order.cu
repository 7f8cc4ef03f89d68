// Sorts the rows of tiles of a mask by their number of visited tiles (tile_bits.cuh), so that a
// launch begins with the longest ones and ends evenly. A block has one sequence. Rows that visit as
// many stay in their order: those beside each other read the same keys.
#include "../../common/types.cuh"

struct MaskOrderParams {
  const uint32_t* bits;
  int* work;   // [batch, rows], the visited tiles
  int* order;  // [batch, rows], see MaskTileBits
  int rows;
  int words;
};

template <bool BY_KEYS, int NUM_WARPS>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    mask_order(const __grid_constant__ MaskOrderParams params) {
  const int rows = params.rows;
  const uint32_t* bits = params.bits + int64_t(blockIdx.x) * rows * params.words * 2;
  int* const work = params.work + int64_t(blockIdx.x) * rows;
  int* const order = params.order + int64_t(blockIdx.x) * rows;
  // `block` is the number of a row in TileOrder, where the last one of the queries comes first, but
  // the first one of the keys.
#pragma unroll 1
  for (int block = threadIdx.x; block < rows; block += NUM_WARPS * 32) {
    const int row = BY_KEYS ? rows - 1 - block : block;
    int visited = 0;
#pragma unroll 1
    for (int i = 0; i < params.words; ++i)
      visited += __popc(bits[int64_t(row) * params.words * 2 + i]);
    work[block] = visited;
  }
  __syncthreads();  // the work of all rows is known
#pragma unroll 1
  for (int block = threadIdx.x; block < rows; block += NUM_WARPS * 32) {
    const int own = work[block];
    int before = 0;
#pragma unroll 4
    for (int other = 0; other < rows; ++other) {
      const int found = work[other];
      before += found < own || (found == own && other < block);
    }
    order[before] = block;
  }
}
