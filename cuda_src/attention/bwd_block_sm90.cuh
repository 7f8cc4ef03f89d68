// Common parts of the sm_90 backward kernels: the tile of a block, its barriers, the producers, and
// the place of dQ in its accumulator.
#pragma once
#include "../common/ring.cuh"
#include "../common/smem_tile.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "block_info.cuh"
#include "params.cuh"
#include "tensor_rows.cuh"
#include "tile_order.cuh"

// The record of a key tile and of the queries that see it, which the scheduler writes for all
// roles. n_rows = 0 ends the work of the block.
struct BwdTile {
  Sequence sequence;
  TileRange m_range;
  int n_block;
  int n_begin;
  int n_rows;
  int batch;
  int head_kv;
  int head_begin;  // the query heads that share this key head
  int head_end;

  __device__ bool has_queries() const { return m_range.begin < m_range.end; }

  __device__ void locate(const FlashBwdParams& params, const Tile& tile, int block_m, int block_n) {
    const AttentionShape& shape = params.shape;
    sequence = load_sequence(params, tile.batch);
    // The first keys are seen by most queries.
    n_block = ceil_div(sequence.seqlen_k, block_n) - 1 - tile.block;
    n_begin = n_block * block_n;
    n_rows = min(block_n, sequence.seqlen_k - n_begin);
    m_range = query_tiles(sequence, n_begin, n_begin + n_rows, block_m);
    // Keys past the end arrive as zeros, and the probability of a score 0 can overflow: then dS is
    // not finite, and neither is its product with the zeros of K. So they need the mask.
    if (n_rows < block_n) m_range.inner_end = m_range.inner_begin;
    batch = tile.batch;
    head_kv = tile.head;
    const int group = shape.heads_q / shape.heads_kv;
    head_begin = tile.head * group;
    head_end = head_begin + group;
  }
};

// The scheduler waits at each tile until both producers have loaded it, and the warp that adds dQ
// (or keeps the turns) has begun it. The producers are a tile ahead of the consumers.
constexpr int BWD_TILE_RECORDS = 4;

// K and V have one buffer, so its parity is that of the tile's number.
__device__ __forceinline__ Ring<1> kv_place(const Ring<BWD_TILE_RECORDS>& record) {
  return {0, uint32_t(record.stage % 2)};
}

template <int BLOCK_M, int STAGES>
struct BwdShared {
  RingBarriers<BWD_TILE_RECORDS> located;  // `full` only
  RingBarriers<1> k;
  RingBarriers<1> v;
  RingBarriers<STAGES> q;  // Q, lse_log2 and delta
  RingBarriers<STAGES> dout;
  uint64_t almost_loaded;
  alignas(16) float lse_log2[STAGES][BLOCK_M];
  alignas(16) float delta[STAGES][BLOCK_M];
  BwdTile tiles[BWD_TILE_RECORDS];

  // `followers` roles arrive at almost_loaded once a tile, which the scheduler waits for.
  __device__ void init(int consumers, int followers) {
    located.init(1);
    k.init(consumers / 32);  // by warp
    v.init(consumers / 32);
    q.init(consumers);  // by thread: lse_log2 and delta are read with ordinary loads
    dout.init(consumers / 32);
    mbarrier_init(smem_address(&almost_loaded), followers);
    mbarrier_init_fence();
  }

  // Waits for the record of the next tile.
  __device__ const BwdTile& wait_tile(const Ring<BWD_TILE_RECORDS>& record) {
    located.wait_full(record);
    return tiles[record.stage];
  }
};

// The scheduler, one lane, chooses the tiles.
template <int BLOCK_M, int STAGES>
__device__ __forceinline__ void schedule_bwd_tiles(const FlashBwdSm90Params& params,
                                                   BwdShared<BLOCK_M, STAGES>& shared,
                                                   int block_n) {
  const AttentionShape& shape = params.base.shape;
  const TileOrder order(shape, ceil_div(shape.seqlen_k, block_n), shape.heads_kv,
                        params.packed_tiles);
  const uint32_t num_tiles = order.size();
  // A deterministic sum makes blocks wait for each other, and a block may wait only for tiles of
  // blocks that run already: so every tile is taken by ticket, the first ones too.
  int* tickets = params.base.dq_semaphore;
  uint32_t index = tickets ? atomicAdd(tickets, 1) : blockIdx.x;
  Ring<BWD_TILE_RECORDS> record;
  Ring<1> loaded;
#pragma unroll 1
  for (;;) {
    BwdTile& tile = shared.tiles[record.stage];
    tile.n_rows = 0;
    if (index < num_tiles) tile.locate(params.base, order.at(index), BLOCK_M, block_n);
    mbarrier_arrive(smem_address(&shared.located.full[record.stage]));
    if (index >= num_tiles) return;
    mbarrier_wait(smem_address(&shared.almost_loaded), loaded.parity);
    index =
        tickets ? atomicAdd(tickets, 1) : next_tile_index(params.tile_counter, index, num_tiles);
    loaded.advance();
    record.advance();
  }
}

// The first row of a query tile in lse_log2, delta and dq_accum.
__device__ __forceinline__ int64_t accum_row(const FlashBwdParams& params, const BwdTile& tile,
                                             int head, int m_begin) {
  return head * params.accum_rows + tile.sequence.accum_start + m_begin;
}

// The order of dQ in dq_accum: blocks of 64 rows; in each, blocks of eight columns; in each of
// these, the fragments of a warpgroup (ptx/wgmma.cuh), four floats a thread.
__device__ __forceinline__ int dq_fragment_offset(int octet) {
  return (octet * WARPGROUP + threadIdx.x % WARPGROUP) * 4;
}

// The number of key tiles that must have added to a query tile before this one, and the flag that
// counts them; element 0 of the semaphore is the ticket counter.
__device__ __forceinline__ int turn_of_tile(const BwdTile& tile, int m_begin, int block_m,
                                            int block_n) {
  const int row_end = min(tile.sequence.seqlen_q, m_begin + block_m);
  return tile.n_block - key_tiles(tile.sequence, m_begin, row_end, block_n).begin;
}
__device__ __forceinline__ int* turn_flag(const FlashBwdParams& params, int64_t accum_row,
                                          int block_m) {
  return params.dq_semaphore + 1 + accum_row / block_m;
}

// All roles walk over the query tiles from the last to the first: under a causal mask the blocks of
// a head then begin together, share Q and dO in the L2 cache, and those that take turns follow each
// other a tile apart.
//
// A producer loads a tile of keys once, and each tile of queries that multiplies it. There are two
// producers: one of K, of Q and the constants of its rows, the other of V and dO.
enum class RowConstants { SKIP, LOAD };  // lse_log2 and delta

template <int STAGES>
struct BwdLoad {
  RowsMap kv_map;
  RowsMap q_map;
  uint32_t smem_kv;
  uint32_t smem_q;
  RingBarriers<1>& kv;
  RingBarriers<STAGES>& q;
  RowConstants constants;
};

struct NothingElse {
  __device__ void operator()(const BwdTile&, int, int) const {}
};

// A producer, one lane. It calls load_more(tile, head, m) at each tile of queries.
template <class TileQ, class TileKV, int STAGES, class LoadMore = NothingElse>
__device__ __forceinline__ void load_bwd_tiles(const FlashBwdSm90Params& params,
                                               BwdShared<TileQ::ROWS, STAGES>& shared,
                                               const BwdLoad<STAGES>& to, LoadMore load_more = {}) {
  constexpr uint32_t ROW_FLOATS = TileQ::ROWS * sizeof(float);
  const bool with_constants = to.constants == RowConstants::LOAD;
  const uint32_t stage_bytes = TileQ::BYTES + (with_constants ? 2 * ROW_FLOATS : 0);
  Ring<BWD_TILE_RECORDS> record;
  Ring<STAGES> ring;
#pragma unroll 1
  for (;; record.advance()) {
    const BwdTile& tile = shared.wait_tile(record);
    if (tile.n_rows == 0) return;
    const uint32_t almost_loaded = smem_address(&shared.almost_loaded);
    const uint32_t kv_full = smem_address(&to.kv.full[0]);
    to.kv.wait_empty(kv_place(record));
    if (!tile.has_queries()) {  // the consumers still wait for this tile and release it
      mbarrier_arrive(kv_full);
      mbarrier_arrive(almost_loaded);
      continue;
    }
    mbarrier_arrive_expect(kv_full, TileKV::BYTES);
    const TensorRows kv_rows(params, to.kv_map, tile.sequence, tile.batch);
#pragma unroll
    for (int block = 0; block < TileKV::NUM_BLOCKS; ++block) {
      kv_rows.load(to.smem_kv + block * TileKV::BLOCK_BYTES, kv_full, block, tile.n_begin,
                   tile.head_kv);
    }
    const TensorRows q_rows(params, to.q_map, tile.sequence, tile.batch);
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
      for (int m = tile.m_range.end - 1; m >= tile.m_range.begin; --m, ring.advance()) {
        to.q.wait_empty(ring);
        const uint32_t full = smem_address(&to.q.full[ring.stage]);
        mbarrier_arrive_expect(full, stage_bytes);
#pragma unroll
        for (int block = 0; block < TileQ::NUM_BLOCKS; ++block) {
          q_rows.load(to.smem_q + ring.stage * TileQ::BYTES + block * TileQ::BLOCK_BYTES, full,
                      block, m * TileQ::ROWS, head);
        }
        if (with_constants) {
          const int64_t row = accum_row(params.base, tile, head, m * TileQ::ROWS);
          bulk_load(smem_address(shared.lse_log2[ring.stage]), params.base.lse_log2 + row,
                    ROW_FLOATS, full);
          bulk_load(smem_address(shared.delta[ring.stage]), params.base.delta + row, ROW_FLOATS,
                    full);
        }
        load_more(tile, head, m);
      }
    }
    mbarrier_arrive(almost_loaded);
  }
}
