// Blocks of flash_bwd_sm90.cu that take whole heads: the record of a tile, the scheduler, and the
// place of dQ.
#pragma once
#include "bwd_block_sm90.cuh"

// For a block that takes the key tiles of a head one after the other, the first keys first. Every
// query sees the first tile, and the last one that it sees completes its dQ.
struct BwdHeadTile : BwdWalkingTile<false> {
  static constexpr bool WHOLE_HEADS = true;

  __device__ bool begins_dq() const { return n_block == 0; }
  // Whether the queries before m_end see no later keys.
  __device__ bool completes_dq(int m_end) const {
    return sequence.key_end(min(m_end, sequence.seqlen_q) - 1) <= n_begin + n_rows;
  }
};

// The scheduler, one lane, as schedule_bwd_tiles(): `index` is that of a head here, and the key
// tiles of a head have consecutive records.
template <int BLOCK_M, class Shared>
__device__ __forceinline__ void schedule_bwd_heads(const FlashBwdSm90Params& params, Shared& shared,
                                                   int block_n) {
  const AttentionShape& shape = params.base.shape;
  const auto heads = [&] { return uint32_t(shape.heads_kv * shape.group_shares); };
  shared.tiles[0].index = blockIdx.x;
  shared.tiles[0].n_block = 0;
#pragma unroll 1
  for (int stage = 0;;) {
    auto& tile = shared.tiles[stage];
    tile.n_rows = 0;
    forget_registers();
    if (tile.index < heads() * shape.batch) {
      const int later = ceil_div(shape.seqlen_k, block_n) - 1 - tile.n_block;
      tile.locate(params.base, {later, int(tile.index % heads()), int(tile.index / heads())},
                  BLOCK_M, block_n);
    }
    mbarrier_arrive(smem_address(&shared.located.full[stage]));
    if (tile.n_rows == 0) return;
    mbarrier_wait(smem_address(&shared.almost_loaded), stage % 2);
    stage = (stage + 1) % BWD_TILE_RECORDS;
    auto& next = shared.tiles[stage];
    next.index = tile.index;
    next.n_block = tile.n_block + 1;
    if (tile.n_begin + block_n < shape.seqlen_k) continue;
    next.index = next_tile_index(params.tile_counter, tile.index, heads() * shape.batch);
    next.n_block = 0;
  }
}

// The first row of a query tile in dq_accum, where a block has a place for the query heads that it
// computes at the moment, and for no others.
__device__ __forceinline__ int64_t own_accum_row(const FlashBwdParams& params, const BwdTile& tile,
                                                 int head, int m_begin) {
  const AttentionShape& shape = params.shape;
  const int heads = ceil_div(shape.heads_q / shape.heads_kv, shape.group_shares);
  const int64_t own = int64_t(blockIdx.x) * heads + head - tile.head_begin;
  return own * round_up(shape.seqlen_q, ACCUM_ROW_ALIGN) + m_begin;
}
