// Converts the accumulator of dQ after flash_bwd_sm80.cu: dQ = scale * dq_accum, from float32 in
// the order of dq_fragment_offset() to rows of 16-bit values. A block handles one query tile of
// BLOCK_M rows, with the warp grid of the main kernel, and turns its fragments into rows in shared
// memory.
#include "../../common/smem_tile.cuh"
#include "../dq_rows.cuh"
#include "bwd_warps.cuh"

template <typename T, int HEAD_DIM, int BLOCK_M, int NUM_WARPS, int ARCH, int SMEM_BYTES>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    flash_bwd_postprocess_sm80(const __grid_constant__ FlashBwdParams params) {
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using GridQ = WarpGrid<BLOCK_M, HEAD_DIM, NUM_WARPS>;
  static_assert(TileQ::BYTES == SMEM_BYTES, "host and device disagree on shared memory");

  const DqRows rows = dq_rows_of_block<HEAD_DIM, BLOCK_M>(params);
  if (rows.count <= 0) return;

  float acc[GridQ::M][GridQ::N][4];
#pragma unroll
  for (int m = 0; m < GridQ::M; ++m) {
#pragma unroll
    for (int n = 0; n < GridQ::N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[m][n][i] = params.shape.scale * rows.accum[dq_fragment_offset<GridQ>(m, n, i)];
      }
    }
  }

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_dq = smem_address(smem);
  store_fragments<TileQ, T, ARCH>(smem_dq, GridQ::row(), GridQ::col(), acc);
  __syncthreads();  // dQ is complete in shared memory
  store_tile<TileQ, NUM_WARPS * 32>(static_cast<T*>(params.dq) + rows.place, params.dq_strides.row,
                                    smem_dq, rows.count, params.shape.head_dim);
}
