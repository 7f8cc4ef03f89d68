// Blocks of flash_bwd_sm90.cu that take whole heads: the record of a tile, the scheduler, and what
// becomes of dQ.
#pragma once
#include "../store_rows.cuh"
#include "bwd_block.cuh"

// The tile of a block that takes the key tiles of a head one after the other, the first keys first.
// Every query sees the first tile, and the last one that a query tile sees completes its dQ. No
// later tile visits it: masks that hide keys on the right follow the diagonal of the last queries
// and keys, or (top-left) that of a causal mask, on which key tiles begin where query tiles do.
struct BwdHeadTile : BwdWalkingTile<false> {
  static constexpr bool WHOLE_HEADS = true;

  __device__ bool begins_dq() const { return n_block == 0; }
  // Whether the last query before m_end, and so every one of its tile, sees no later keys.
  __device__ bool completes_dq(int m_end) const {
    return sequence.key_end(min(m_end, sequence.seqlen_q) - 1) <= n_begin + n_rows;
  }
};

// The scheduler, one lane, takes the place of schedule_bwd_tiles(). `index` is that of a head here,
// and the key tiles of a head have consecutive records.
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

// A block has a place in dq_accum for the query heads that it computes at the moment, each with all
// its rows. These functions return the rows of a head and the first row of the place.
__device__ __forceinline__ int accum_rows_of_head(const AttentionShape& shape) {
  return round_up(shape.seqlen_q, ACCUM_ROW_ALIGN);
}
__device__ __forceinline__ int64_t own_accum_row(const AttentionShape& shape) {
  const int heads = ceil_div(shape.heads_q / shape.heads_kv, shape.group_shares);
  return int64_t(blockIdx.x) * heads * accum_rows_of_head(shape);
}

// A consumer (BwdConsumer) hands its part of dQ to the reducer, which adds it to the sum. With the
// last keys of a query tile the reducer has fetched the sum into the buffer instead; the consumer
// adds it to its part, and writes dq.
template <class C, int N>
__device__ __forceinline__ void finish_dq(C& consumer, float (&dq)[N][4], const BwdHeadTile& tile,
                                          int head, int m_begin) {
  using L = typename C::Layout;
  const bool completes = uniform(tile.completes_dq(m_begin + L::BLOCK_M));
  if (!completes || !uniform(tile.begins_dq())) {
    consumer.dq_barriers[consumer.group].wait_full(consumer.dq_ring);
    consumer.dq_ring.advance();
    const uint32_t address = opaque(consumer.dq_address(0));
    if (completes) {
      uint32_t loaded = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const uint4 earlier = ld_shared_128(address + n * WARPGROUP * sizeof(uint4));
        dq[n][0] += __uint_as_float(earlier.x);
        dq[n][1] += __uint_as_float(earlier.y);
        dq[n][2] += __uint_as_float(earlier.z);
        dq[n][3] += __uint_as_float(earlier.w);
        loaded |= earlier.x;
      }
      wait_for_loads(loaded);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) st_shared_128(address + n * WARPGROUP * sizeof(uint4), dq[n]);
      fence_async_proxy();  // dQ becomes visible to the copy engine
    }
    consumer.dq_barriers[consumer.group].release_by_thread(0);
  }
  if (!completes) return;
  const FlashBwdParams& base = consumer.params.base;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) dq[n][i] *= base.shape.scale;
  }
  const int warp_row = (fresh_thread_index() - WARPGROUP) / 32 * 16;
  const int row = m_begin + (L::SPLIT_ROWS ? warp_row : warp_row % 64);
  const int column = L::SPLIT_ROWS ? 0 : consumer.group * L::DQ_COLS;
  store_rows(static_cast<typename C::T*>(base.dq) +
                 base.dq_strides.at(tile.batch, row, opaque(head)) + column,
             base.dq_strides.row, dq, tile.sequence.seqlen_q - row, base.shape.head_dim - column);
}
