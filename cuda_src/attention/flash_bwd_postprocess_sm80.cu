// Converts the accumulator of dQ after flash_bwd_sm80.cu: dQ = scale * dq_accum, from float32 in
// the order of dq_fragment_offset() to rows of 16-bit values. A block handles one query tile of
// BLOCK_M rows, with the warp grid of the main kernel, and turns its fragments into rows in shared
// memory.
#include "../common/smem_tile.cuh"
#include "block_info.cuh"
#include "bwd_warps_sm80.cuh"
#include "params.cuh"
#include "tile_order.cuh"

template <typename T, int HEAD_DIM, int BLOCK_M, int NUM_WARPS, int ARCH, int SMEM_BYTES>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    flash_bwd_postprocess_sm80(const __grid_constant__ FlashBwdParams params) {
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using GridQ = WarpGrid<BLOCK_M, HEAD_DIM, NUM_WARPS>;
  static_assert(TileQ::BYTES == SMEM_BYTES, "host and device disagree on shared memory");

  const AttentionShape& shape = params.shape;
  const Tile tile =
      tile_of_block(blockIdx.x, ceil_div(shape.seqlen_q, BLOCK_M), shape.heads_q, shape.batch, 1);
  const Sequence sequence = load_sequence(params, tile.batch);
  const int m_begin = tile.block * BLOCK_M;
  const int m_rows = min(BLOCK_M, sequence.seqlen_q - m_begin);
  if (m_rows <= 0) return;

  const float* dq_accum =
      params.dq_accum + (tile.head * params.accum_rows + sequence.accum_start + m_begin) * HEAD_DIM;
  float acc[GridQ::M][GridQ::N][4];
#pragma unroll
  for (int m = 0; m < GridQ::M; ++m) {
#pragma unroll
    for (int n = 0; n < GridQ::N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[m][n][i] = shape.scale * dq_accum[dq_fragment_offset<GridQ>(m, n, i)];
      }
    }
  }

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_dq = smem_address(smem);
  store_fragments<TileQ, T, ARCH>(smem_dq, GridQ::row(), GridQ::col(), acc);
  __syncthreads();  // dQ is complete in shared memory
  T* dq = static_cast<T*>(params.dq) + tile.batch * params.dq_strides.batch +
          (sequence.start_q + m_begin) * params.dq_strides.row + tile.head * params.dq_strides.head;
  store_tile<TileQ, NUM_WARPS * 32>(dq, params.dq_strides.row, smem_dq, m_rows, shape.head_dim);
}
