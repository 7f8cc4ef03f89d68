// The sum of dQ over the key tiles, in global memory, for the mma.sync backward kernels.
#pragma once
#include "../../ptx/atomics.cuh"
#include "bwd_tile.cuh"
#include "bwd_warps.cuh"

// How a lane finds the addresses of its reductions, which lie at constant distances. One address
// for all of them saves five instructions a reduction, but takes registers that wide heads lack.
enum class DqAddresses { EACH, ONE };

// The turn of a block among those that add to a query tile, for a deterministic sum (dq_semaphore).
// It comes after the turns of all key tiles before it. All threads of the block call both
// functions.
template <int BLOCK_M, int BLOCK_N, class Block>
struct DqTurn {
  // The flag counts the key tiles that have added to this query tile. Element 0 is the ticket
  // counter.
  const Block& block;
  int* flag;
  int m_block;

  __device__ DqTurn(const FlashBwdParams& params, const Block& block, int64_t accum_row,
                    int m_block)
      : block(block),
        flag(params.dq_semaphore ? params.dq_semaphore + 1 + accum_row / BLOCK_M : nullptr),
        m_block(m_block) {}

  __device__ void wait() const {
    if (!flag) return;
    if (threadIdx.x == 0) {
      const int row_end = min(block.sequence.seqlen_q, (m_block + 1) * BLOCK_M);
      const TileRange n_range = key_tiles(block.sequence, m_block * BLOCK_M, row_end, BLOCK_N);
      wait_flag_fenced(flag, block.n_block - n_range.begin);
    }
    __syncthreads();  // it is this block's turn
  }

  __device__ void release() const {
    if (!flag) return;
    __syncthreads();  // all threads have added, and the release publishes it
    if (threadIdx.x == 0) release_flag(flag);
  }
};

// Adds columns of a block's dQ to dq_accum: those of the accumulators from [.][column] of a warp
// on.
template <int HEAD_DIM, class GridQ, DqAddresses ADDRESSES = DqAddresses::EACH, int N>
__device__ __forceinline__ void add_columns_of_dq(const FlashBwdParams& params, int64_t accum_row,
                                                  int column,
                                                  const float (&acc_dq)[GridQ::M][N][4]) {
  constexpr bool ONE = ADDRESSES == DqAddresses::ONE;
  float* dq_accum = params.dq_accum + accum_row * HEAD_DIM;
  if constexpr (ONE) dq_accum += dq_fragment_offset<GridQ>(0, 0, 0);
#pragma unroll
  for (int m = 0; m < GridQ::M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t offset = ONE ? ((m * GridQ::N + column + n) * 4 + i) * 32  // 32 lanes each
                                   : dq_fragment_offset<GridQ>(m, column + n, i);
        red_add(dq_accum + offset, acc_dq[m][n][i]);
      }
    }
  }
}

// Adds a block's dQ of query tile m_block to dq_accum, in its turn.
template <int BLOCK_M, int BLOCK_N, int HEAD_DIM, class GridQ,
          DqAddresses ADDRESSES = DqAddresses::EACH, class Block>
__device__ __forceinline__ void add_dq(const FlashBwdParams& params, const Block& block,
                                       int64_t accum_row, int m_block,
                                       const float (&acc_dq)[GridQ::M][GridQ::N][4]) {
  const DqTurn<BLOCK_M, BLOCK_N, Block> turn(params, block, accum_row, m_block);
  turn.wait();
  add_columns_of_dq<HEAD_DIM, GridQ, ADDRESSES>(params, accum_row, 0, acc_dq);
  turn.release();
}
