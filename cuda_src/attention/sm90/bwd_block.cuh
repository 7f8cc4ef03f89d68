// The common parts of flash_bwd_sm90.cu and flash_bwd_wide_sm90.cu: the tile of a block, its
// barriers, the scheduler and the producers, and the order of dQ in its accumulator.
#pragma once
#include "../../common/ring.cuh"
#include "../../common/smem_tile.cuh"
#include "../../ptx/opaque.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../block_info.cuh"
#include "../params.cuh"
#include "../tensor_rows.cuh"
#include "../tile_order.cuh"

// The number of query rows to which a block adds dQ in one turn. Ending a turn and beginning the
// next one take as long as a step of 64 rows, and with two steps a turn nobody waits for that.
constexpr int TURN_ROWS = 128;
static_assert(ACCUM_ROW_ALIGN % TURN_ROWS == 0, "the rows of a turn belong to one sequence");

// The record of a key tile and of the queries that see it, which the scheduler writes for all
// roles. n_rows = 0 ends the work of the block.
struct EveryBwdTile {
  static constexpr bool WHOLE_HEADS = false;
  Sequence sequence;
  TileRange m_range;
  uint32_t index;  // in the order of the tiles
  int n_block;
  int n_begin;
  int n_rows;
  int batch;
  int head_kv;
  int share;       // of the work of this key head
  int head_begin;  // its query heads
  int head_end;

  __device__ bool has_queries() const { return m_range.begin < m_range.end; }

  __device__ void locate(const FlashBwdParams& params, const Tile& tile, int block_m, int block_n,
                         bool last_keys_first) {
    batch = tile.batch;
    head_kv = tile.head;
    n_block = tile.block;
    forget_registers();  // the scheduler has as few as 24
    sequence = load_sequence(params, batch);
    forget_registers();
    share = head_kv % params.shape.group_shares;
    head_kv /= params.shape.group_shares;
    forget_registers();
    const int group = params.shape.heads_q / params.shape.heads_kv;
    head_begin = head_kv * group + share * group / params.shape.group_shares;
    head_end = head_kv * group + (share + 1) * group / params.shape.group_shares;
    if (head_end == head_begin) ++head_end;  // it has some rows of one head
    forget_registers();
    // Under a causal mask the first keys have the most work, unlike the queries of tile_order.cuh.
    // min() changes nothing, but without it ptxas spills two registers at head dims 96 and 128.
    const int last = ceil_div(sequence.seqlen_k, block_n) - 1;
    n_block = last_keys_first ? min(n_block, last) : last - n_block;
    n_begin = n_block * block_n;
    n_rows = min(block_n, sequence.seqlen_k - n_begin);
    forget_registers();
    m_range = query_tiles(sequence, n_begin, n_begin + n_rows, block_m);
    // A tile with keys past the end needs the mask. Such keys arrive as zeros, and exp2 of their
    // score 0 minus lse_log2 can overflow: dS and its product with the zeros of K are not finite
    // then.
    if (n_rows < block_n) m_range.inner_end = m_range.inner_begin;
    take_share_of_rows(params.shape, block_m);
  }

  __device__ bool needs_mask(int m) const { return m_range.needs_mask(m); }
  __device__ int m_below(int m) const { return m - 1; }  // the query tile below this one

 private:
  // More shares than query heads are a multiple of them. Each then has one head, and a part of the
  // query tiles. How this is written decides how ptxas orders the softmax of the consumers: with a
  // branch in front of it, the backward of head dim 64 loses 3 to 5 %.
  __device__ void take_share_of_rows(const AttentionShape& shape, int block_m) {
    const int tiles_of_turn = TURN_ROWS / block_m;
    const uint32_t parts = max(1, shape.group_shares / (shape.heads_q / shape.heads_kv));
    const uint32_t part = uint32_t(share) % parts;
    const uint32_t tiles = max(0, m_range.end - m_range.begin);
    const uint32_t turns = ceil_div(tiles, tiles_of_turn);
    m_range.end = m_range.begin + min(tiles, turns * (part + 1) / parts * tiles_of_turn);
    m_range.begin += turns * part / parts * tiles_of_turn;
  }
};

// The record where the mask of a text leaves query tiles empty, which are not visited.
struct SeenBwdTile : EveryBwdTile {
  TileRow row;

  __device__ void locate(const FlashBwdParams& params, Tile tile, int block_m, int block_n,
                         bool last_keys_first) {
    tile.block = row_by_work(params, tile.batch, tile.block);
    EveryBwdTile::locate(params, tile, block_m, block_n, last_keys_first);
    row.locate(params, batch, n_block);
    row.tighten(m_range);
  }
  __device__ bool needs_mask(int m) const { return !row.is_full(m) || m_range.needs_mask(m); }
  __device__ int m_below(int m) const { return row.last_up_to(m - 1); }
};
using BwdTile = typename Choose<HAS_MASK_TILES, SeenBwdTile, EveryBwdTile>::Type;

// The order in which a block visits the query tiles of a head:
//   for (int m = tile.first_m(); tile.is_m(m); m = tile.next_m(m))
// A block walks from the last tile to the first. Under a causal mask the blocks of a head then
// begin with the same queries and share Q and dO in L2, and blocks that add in turns follow each
// other one tile apart.
//
// WALKS_UP is for blocks that add in turns under a causal mask, where all that begin at the same
// time would wait for the first. A block walks from the first query tile, on the diagonal of its
// keys, to the last. The blocks of a head then come from the last keys, which few queries see, to
// the first, and each is one tile behind the one that it waits for.
template <bool WALKS_UP_>
struct BwdWalkingTile : BwdTile {
  static constexpr bool WALKS_UP = WALKS_UP_;

  __device__ void locate(const FlashBwdParams& params, const Tile& tile, int block_m, int block_n) {
    BwdTile::locate(params, tile, block_m, block_n, WALKS_UP);
  }

  __device__ int first_m() const { return WALKS_UP ? m_range.begin : m_range.end - 1; }
  __device__ bool is_m(int m) const { return WALKS_UP ? m < m_range.end : m >= m_range.begin; }
  __device__ int next_m(int m) const { return HAS_MASK_TILES || !WALKS_UP ? m_below(m) : m + 1; }
};

// The order of BwdWalkingTile under a causal mask and where blocks add in turns. Otherwise a block
// begins where its keys meet the diagonal, and goes on with the first tile after the last: the
// blocks of a head are at different queries at any time, and few of them add to the same rows of
// dQ.
template <bool WALKS_UP_>
struct BwdRoundTile : BwdTile {
  static constexpr bool WALKS_UP = WALKS_UP_;
  int m_first;
  int m_last;
  int m_step;  // 1 or -1

  __device__ void locate(const FlashBwdParams& params, const Tile& tile, int block_m, int block_n) {
    BwdTile::locate(params, tile, block_m, block_n, WALKS_UP);
    forget_registers();
    m_first = WALKS_UP ? m_range.begin : m_range.end - 1;
    m_last = WALKS_UP ? m_range.end - 1 : m_range.begin;
    m_step = WALKS_UP ? 1 : -1;
    if constexpr (HAS_MASK_TILES) return;
    if (WALKS_UP || params.dq_semaphore || sequence.window_right < sequence.seqlen_k) return;
    m_first = max(m_range.begin, min((n_begin - sequence.diagonal) / block_m, m_first));
    m_last = m_first > m_range.begin ? m_first - 1 : m_range.end - 1;
    m_step = 1;
  }

  __device__ int first_m() const { return has_queries() ? m_first : -1; }
  __device__ bool is_m(int m) const { return m >= 0; }
  __device__ int next_m(int m) const { return m == m_last ? -1 : m_after(m); }

  // The tile after one that is not the last.
  __device__ int m_after(int m) const {
    if constexpr (HAS_MASK_TILES) return m_below(m);
    m += m_step;
    return m == m_range.end ? m_range.begin : m;
  }
};

// The scheduler waits at each tile until both producers have loaded it, and until the warp that
// adds dQ (or keeps the turns) has begun it. The producers are at most one tile ahead of the
// consumers.
constexpr int BWD_TILE_RECORDS = 4;

// K and V have one buffer each, so the parity of its barriers is that of the tile's number. As the
// number of records is even, the number of the record has the same parity.
__device__ __forceinline__ Ring<1> kv_place(const Ring<BWD_TILE_RECORDS>& record) {
  return {0, uint32_t(record.stage % 2)};
}

// The barriers of a block, the records of its tiles, and the constants of their queries, in static
// shared memory. dO may have fewer stages than Q.
template <class BlockTile_, int BLOCK_M, int STAGES, int DOUT_STAGES = STAGES>
struct BwdShared {
  using BlockTile = BlockTile_;
  RingBarriers<BWD_TILE_RECORDS> located;  // only `full` is used
  RingBarriers<1> k;
  RingBarriers<1> v;
  RingBarriers<STAGES> q;  // Q, lse_log2 and delta
  RingBarriers<DOUT_STAGES> dout;
  uint64_t almost_loaded;
  alignas(16) float lse_log2[STAGES][BLOCK_M];
  alignas(16) float delta[STAGES][BLOCK_M];
  BlockTile tiles[BWD_TILE_RECORDS];
  uint32_t num_tiles;

  // The scheduler waits at almost_loaded until each of the `followers` has arrived, once a tile.
  __device__ void init(int consumers, int followers) {
    located.init(1);
    k.init(consumers / 32);  // the consumers arrive by warp
    v.init(consumers / 32);
    q.init(consumers);  // they arrive by thread, because they read lse_log2 by ordinary loads
    dout.init(consumers / 32);
    mbarrier_init(smem_address(&almost_loaded), followers);
    mbarrier_init_fence();
  }

  // Waits for the record of the next tile.
  __device__ const BlockTile& wait_tile(const Ring<BWD_TILE_RECORDS>& record) {
    located.wait_full(record);
    return tiles[record.stage];
  }
};

// The scheduler, one lane, chooses the tiles and writes their records.
template <int BLOCK_M, class Shared>
__device__ __forceinline__ void schedule_bwd_tiles(const FlashBwdSm90Params& params, Shared& shared,
                                                   int block_n) {
  const AttentionShape& shape = params.base.shape;
  // For a deterministic sum blocks wait for each other, and a block may wait only for tiles of
  // blocks that run already. So every tile is taken by ticket, including the first of each block.
  int* tickets = params.base.dq_semaphore;
  const auto order = [&] {  // made anew each time, for registers
    return TileOrder(shape, ceil_div(shape.seqlen_k, block_n), shape.heads_kv * shape.group_shares,
                     params.packed_tiles);
  };
  shared.num_tiles = order().size();
  shared.tiles[0].index = tickets ? atomicAdd(tickets, 1) : blockIdx.x;
#pragma unroll 1
  for (int stage = 0;;) {
    auto& tile = shared.tiles[stage];
    tile.n_rows = 0;
    forget_registers();
    if (tile.index < shared.num_tiles) {
      tile.locate(params.base, order().at(tile.index), BLOCK_M, block_n);
    }
    mbarrier_arrive(smem_address(&shared.located.full[stage]));
    if (tile.index >= shared.num_tiles) return;
    mbarrier_wait(smem_address(&shared.almost_loaded), stage % 2);
    stage = (stage + 1) % BWD_TILE_RECORDS;
    shared.tiles[stage].index =
        tickets ? atomicAdd(tickets, 1)
                : next_tile_index(params.tile_counter, tile.index, shared.num_tiles);
  }
}

// The first row of a query tile in lse_log2, delta and dq_accum.
__device__ __forceinline__ int64_t accum_row(const FlashBwdParams& params, const BwdTile& tile,
                                             int head, int m_begin) {
  return head * params.accum_rows + tile.sequence.accum_start + m_begin;
}

// Returns the place of this thread's four floats of eight columns in the dq_accum of 64 rows.
// dq_accum consists of blocks of 64 rows, each of these of blocks of eight columns, and each of
// those of the fragments of a warpgroup (ptx/wgmma.cuh), so that a warpgroup stores and adds whole
// lines.
__device__ __forceinline__ int dq_fragment_offset(int octet) {
  return (octet * WARPGROUP + threadIdx.x % WARPGROUP) * 4;
}

// Whether a producer loads lse_log2 and delta.
enum class RowConstants { SKIP, LOAD };

// The work of a producer, which loads a tile of keys once, and then each tile of queries that meets
// it. One of the two producers loads K, Q and the constants of the queries, the other V and dO.
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

// The default of load_more, which loads nothing.
struct NothingElse {
  __device__ void operator()(const BwdTile&, int, int) const {}
};

// A producer, which is one lane. It calls load_more(tile, head, m) for each tile of queries.
template <class TileQ, class TileKV, int STAGES, class Shared, class LoadMore = NothingElse>
__device__ __forceinline__ void load_bwd_tiles(const FlashBwdSm90Params& params, Shared& shared,
                                               const BwdLoad<STAGES>& to, LoadMore load_more = {}) {
  constexpr uint32_t ROW_FLOATS = TileQ::ROWS * sizeof(float);
  const bool with_constants = to.constants == RowConstants::LOAD;
  const uint32_t stage_bytes = TileQ::BYTES + (with_constants ? 2 * ROW_FLOATS : 0);
  uint32_t tiles = 0, steps = 0;  // counters take fewer registers than places in a ring
  const auto load_queries = [&](const TensorRows& q_rows, const auto& tile, int head, int m) {
    const Ring<STAGES> ring = ring_place<STAGES>(steps);
    to.q.wait_empty(ring);
    const uint32_t full = smem_address(&to.q.full[ring.stage]);
    mbarrier_arrive_expect(full, stage_bytes);
#pragma unroll
    for (int block = 0; block < TileQ::NUM_BLOCKS; ++block) {
      q_rows.load(to.smem_q + ring.stage * TileQ::BYTES + block * TileQ::BLOCK_BYTES, full, block,
                  m * TileQ::ROWS, head);
    }
    if (with_constants) {
      const int64_t row = accum_row(params.base, tile, head, m * TileQ::ROWS);
      bulk_load(smem_address(shared.lse_log2[ring.stage]), params.base.lse_log2 + row, ROW_FLOATS,
                full);
      bulk_load(smem_address(shared.delta[ring.stage]), params.base.delta + row, ROW_FLOATS, full);
    }
    load_more(tile, head, m);
  };
#pragma unroll 1
  for (;; ++tiles) {
    const Ring<BWD_TILE_RECORDS> record = ring_place<BWD_TILE_RECORDS>(tiles);
    const auto& tile = shared.wait_tile(record);
    if (tile.n_rows == 0) return;
    const uint32_t almost_loaded = smem_address(&shared.almost_loaded);
    const uint32_t kv_full = smem_address(&to.kv.full[0]);
    if constexpr (Shared::BlockTile::WHOLE_HEADS) {
      // A head has few queries, so waiting for the first ones would take much of a tile's time.
      // Their buffer is free before that of the keys, which are prefetched to L2 meanwhile. Tiles
      // of two column blocks gain nothing by that.
      if (tile.has_queries()) {
        const TensorRows q_rows(params, to.q_map, tile.sequence, tile.batch);
        load_queries(q_rows, tile, tile.head_begin, tile.first_m());
        forget_registers();
        if constexpr (TileKV::NUM_BLOCKS == 1) {
          const TensorRows kv_rows(params, to.kv_map, tile.sequence, tile.batch);
          kv_rows.prefetch(0, tile.n_begin, tile.head_kv);
        }
      }
      forget_registers();
    }
    to.kv.wait_empty(kv_place(record));
    if (!tile.has_queries()) {  // the consumers still wait for this tile and release it
      mbarrier_arrive(kv_full);
      mbarrier_arrive(almost_loaded);
      continue;
    }
    mbarrier_arrive_expect(kv_full, TileKV::BYTES);
    // The producers of whole heads have few registers.
    const int zero = Shared::BlockTile::WHOLE_HEADS ? opaque(0) : 0;
    const TensorRows kv_rows(params, to.kv_map, tile.sequence, tile.batch, zero);
#pragma unroll
    for (int block = 0; block < TileKV::NUM_BLOCKS; ++block) {
      kv_rows.load(to.smem_kv + block * TileKV::BLOCK_BYTES, kv_full, block, tile.n_begin,
                   tile.head_kv);
    }
    forget_registers();
    const TensorRows q_rows(params, to.q_map, tile.sequence, tile.batch);
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
      for (int m = tile.first_m(); tile.is_m(m); m = tile.next_m(m), ++steps) {
        if constexpr (Shared::BlockTile::WHOLE_HEADS) {
          if (head == tile.head_begin && m == tile.first_m()) continue;  // loaded above
        }
        load_queries(q_rows, tile, head, m);
      }
    }
    mbarrier_arrive(almost_loaded);
  }
}
