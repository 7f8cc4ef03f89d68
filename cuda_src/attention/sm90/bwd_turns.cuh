// The turns in which blocks of flash_bwd_sm90.cu and flash_bwd_wide_sm90.cu add to dQ, for a sum in
// a fixed order.
#pragma once
#include "../../ptx/atomics.cuh"
#include "bwd_block.cuh"

// turn_of_tile() returns the number of key tiles that add to the rows of a query tile's turn before
// this one, and turn_flag() the flag that counts them. Element 0 of the semaphore is the ticket
// counter.
template <int BLOCK_M, class BlockTile>
__device__ __forceinline__ int turn_of_tile(const BlockTile& tile, int m_begin, int block_n) {
  const int row_begin = m_begin / TURN_ROWS * TURN_ROWS;
  // Key tiles that only the padding of the last query tile would see visit it, too.
  const int row_end = min(round_up(tile.sequence.seqlen_q, BLOCK_M), row_begin + TURN_ROWS);
  const TileRange keys = key_tiles(tile.sequence, row_begin, row_end, block_n);
  return BlockTile::WALKS_UP ? keys.end - 1 - tile.n_block : tile.n_block - keys.begin;
}
__device__ __forceinline__ int* turn_flag(const FlashBwdParams& params, int64_t accum_row) {
  return params.dq_semaphore + 1 + accum_row / TURN_ROWS;
}

// Ends the turn of a flag, if there is one.
__device__ __forceinline__ void end_turn(int*& flag) {
  if (!flag) return;
  bulk_wait<0>();
  release_flag(flag);
  flag = nullptr;
}

// Ends the turn of a flag, and waits for that of a query tile, unless it is the same. A reducer
// calls this before it waits for dQ, which consumers compute meanwhile. Computing `turn` after
// end_turn() makes ptxas reorder the consumers of head dim 64, which lose 2.5 %.
template <int BLOCK_M, class BlockTile>
__device__ __forceinline__ void begin_turn(int*& flag, const FlashBwdParams& params,
                                           const BlockTile& tile, int64_t accum_row, int m_begin,
                                           int block_n) {
  int* next = turn_flag(params, accum_row);
  if (next == flag) return;
  const int turn = turn_of_tile<BLOCK_M>(tile, m_begin, block_n);
  end_turn(flag);
  flag = next;
  wait_flag(flag, turn);
}
