// The block of the sm_90 forward kernel: its tiles and barriers in shared memory, and its producer
// lanes: the scheduler, the loaders and the writer. flash_fwd_sm90.cu describes the roles.
#pragma once
#include "../../common/ring.cuh"
#include "../../common/smem_tile.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../block_info.cuh"
#include "../params.cuh"
#include "../tensor_rows.cuh"
#include "../text/tile_parts.cuh"
#include "../tile_order.cuh"
#include "bias_tile.cuh"

// The barriers at which the consumer warpgroups wait for each other, one for each.
enum class NamedBarrier { ORDER_OF_GROUP_0 = 1, ORDER_OF_GROUP_1, ORDER_OF_GROUP_2 };
__device__ __forceinline__ NamedBarrier order_of_group(int group) {
  return static_cast<NamedBarrier>(static_cast<int>(NamedBarrier::ORDER_OF_GROUP_0) + group);
}

// The next tile is chosen when this number of key tiles of the current one is still to be loaded:
// late, so that the work is divided evenly among the blocks, but early enough for its first loads.
constexpr int LOOK_AHEAD = 3;

// The record of a query tile, which the scheduler writes for all roles. m_rows = 0 ends the work of
// the block. Every key tile in its range is visited.
struct EveryFwdTile {
  alignas(16) TileRange n_range;  // read as one vector
  Sequence sequence;
  int m_begin;
  int m_rows;
  int head;
  int batch;
  int split;

  __device__ bool has_keys() const { return n_range.begin < n_range.end; }

  __device__ void locate(const FlashFwdParams& params, const Tile& tile, int block_m, int block_n) {
    sequence = load_sequence(params, tile.batch);
    m_begin = (HAS_MASK_TILES ? row_by_work(params, tile.batch, tile.block) : tile.block) * block_m;
    m_rows = min(block_m, sequence.seqlen_q - m_begin);
    n_range = key_tiles(sequence, m_begin, m_begin + m_rows, block_n);
    if (HAS_USER_SCORE && m_rows < block_m) n_range.inner_end = n_range.inner_begin;
    head = tile.head;
    batch = tile.batch;
  }

  // Leaves only the keys of this split, one of num_splits.
  __device__ void take_split(int index, int num_splits) {
    split = index;
    const int first = n_range.begin;
    const int count = max(0, n_range.end - first);
    n_range.begin = first + count * split / num_splits;
    n_range.end = first + count * (split + 1) / num_splits;
  }

  __device__ int next_n(int n) const { return n - 1; }  // the key tile after this one
  // The key tile at which the next query tile is chosen.
  __device__ int almost_last() const { return min(n_range.end - 1, n_range.begin + LOOK_AHEAD); }
  __device__ int key_tile(int n) const { return n; }

  // The first row of the tile in lse.
  __device__ int64_t lse_row(const FlashFwdParams& params) const {
    return batch * params.lse_batch_stride + head * params.lse_head_stride + sequence.start_q +
           m_begin;
  }
};

// The record where the mask of a text leaves key tiles empty, which are not visited.
struct SeenFwdTile : EveryFwdTile {
  TileRow row;
  int almost;

  // Leaves out the empty tiles in front and at the end.
  __device__ void skip_empty(const FlashFwdParams& params, int block_m) {
    row.locate(params, batch, m_begin / block_m);
    row.tighten(n_range);
    almost = row.some_behind(n_range, LOOK_AHEAD);
  }
  __device__ int next_n(int n) const { return row.last_up_to(n - 1); }
  __device__ int almost_last() const { return almost; }
};

// The record where scores may fall with the distance from the diagonal. The tile on the diagonal is
// the first, then those to its left, then the others from the last one on: so the first tile has
// the maxima, as with a causal mask. From the last tile on, each step would find larger scores.
struct TurnedFwdTile : EveryFwdTile {
  int turn;  // from the last tile of the range to that on the diagonal

  __device__ void turn_to_diagonal(int block_n) {
    const int on_diagonal = max(0, m_begin + m_rows - 1 + sequence.diagonal) / block_n;
    turn = n_range.end - 1 - max(n_range.begin, min(on_diagonal, n_range.end - 1));
  }
  // The key tile that is visited when n counts down from the last one to the first.
  __device__ static int turned(int n, int turn, int begin, int end) {
    return n - turn >= begin ? n - turn : n - turn + end - begin;
  }
  __device__ int key_tile(int n) const { return turned(n, turn, n_range.begin, n_range.end); }
};

// The tiles of a block in dynamic shared memory: rings of Q, of K and of V. A bias by TMA has a
// ring for each consumer warpgroup, or where there is no room one tile, which is released early.
template <int HEAD_DIM_, int HEAD_DIM_V_, int BLOCK_M_, int BLOCK_N_, int Q_STAGES_, int KV_STAGES_,
          BiasKind BIAS, ColumnStep STEP, bool FROM_DIAGONAL_>
struct FwdLayout {
  static constexpr bool FROM_DIAGONAL = FROM_DIAGONAL_ && !HAS_MASK_TILES;
  static constexpr bool INNER_APART = FROM_DIAGONAL_;  // inner tiles may have others between them
  using Tile =
      typename Choose<HAS_MASK_TILES, SeenFwdTile,
                      typename Choose<FROM_DIAGONAL, TurnedFwdTile, EveryFwdTile>::Type>::Type;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int BLOCK_N = BLOCK_N_;
  static constexpr int Q_STAGES = Q_STAGES_;
  static constexpr int KV_STAGES = KV_STAGES_;
  static constexpr int GROUPS = BLOCK_M / 64;  // consumer warpgroups
  using TileQ = SmemTile<BLOCK_M, tile_columns(HEAD_DIM)>;
  using TileK = SmemTile<BLOCK_N, tile_columns(HEAD_DIM)>;
  using TileV = SmemTile<BLOCK_N, tile_columns(HEAD_DIM_V)>;
  using TileO = SmemTile<BLOCK_M, tile_columns(HEAD_DIM_V)>;  // in the place of Q
  static constexpr bool HAS_BIAS = is_by_tma(BIAS);
  static constexpr bool HAS_PARTS = HAS_USER_PARTS && !HAS_MASK_TILES && !HAS_BIAS;
  using Parts = text::PartsOfWarps<HAS_PARTS, BLOCK_N / 8, GROUPS * 4>;
  // Whether S has a term already. Wide heads leave no shared memory for its numbers.
  static constexpr bool TERM_IN_PRODUCT = STEP != ColumnStep::NONE && HEAD_DIM <= 128;
  static constexpr bool HAS_KEY_TERMS = TERM_IN_PRODUCT && STEP == ColumnStep::KEY_TERMS;
  using Numbers =
      typename Choose<HAS_KEY_TERMS, ColumnTerms<BLOCK_N, KV_STAGES>, ColumnNumbers<BLOCK_N>>::Type;
  static constexpr int BIAS_STAGES = HEAD_DIM <= 64 ? 2 : 1;  // of each warpgroup
  using TileBias = SmemTile<64, round_up(BLOCK_N, 64)>;
  static constexpr int K_OFFSET = Q_STAGES * TileQ::BYTES;
  static constexpr int V_OFFSET = K_OFFSET + KV_STAGES * TileK::BYTES;
  static constexpr int BIAS_OFFSET = V_OFFSET + KV_STAGES * TileV::BYTES;
  static constexpr int BIAS_BYTES = HAS_BIAS ? GROUPS * BIAS_STAGES * TileBias::BYTES : 0;
  static constexpr int NUMBERS_OFFSET = BIAS_OFFSET + BIAS_BYTES;
  static constexpr int BYTES = NUMBERS_OFFSET + (TERM_IN_PRODUCT ? Numbers::BYTES : 0);

  // The address of 64 rows of a column block of Q, or of the O that takes its place.
  __device__ static uint32_t q_address(uint32_t smem, int stage, int group, int block) {
    return smem + stage * TileQ::BYTES + block * TileQ::BLOCK_BYTES + group * 64 * TileQ::ROW_BYTES;
  }
  __device__ static uint32_t bias_address(uint32_t smem, int group, int stage) {
    return smem + BIAS_OFFSET + (group * BIAS_STAGES + stage) * TileBias::BYTES;
  }
};

// The scheduler is one tile ahead of the lane that loads Q, which is at most Q_STAGES (2) tiles
// ahead of the consumers and of the O that it stores itself.
constexpr int FWD_TILE_RECORDS = 4;

// The barriers of a block and the records of its tiles, in static shared memory.
template <class L>
struct FwdShared : L::Parts::Type {
  RingBarriers<L::Q_STAGES> q[L::GROUPS];  // only `full` is used
  RingBarriers<L::KV_STAGES> k;
  RingBarriers<L::KV_STAGES> v;
  RingBarriers<FWD_TILE_RECORDS> located;  // only `full` is used
  uint64_t almost_loaded;                  // all loaders let the scheduler choose the next tile
  uint64_t o_full[L::Q_STAGES][L::GROUPS];
  typename L::Tile tiles[FWD_TILE_RECORDS];
  RingBarriers<L::BIAS_STAGES> bias[L::HAS_BIAS ? L::GROUPS : 1];
  float zero;  // only used with a bias

  __device__ void init() {
    for (auto& ring : q) ring.init(1);
    k.init(L::GROUPS * 4, L::HAS_KEY_TERMS ? 2 : 1);  // warps, loaders
    v.init(L::GROUPS * 4);
    located.init(1);
    mbarrier_init(smem_address(&almost_loaded), 2 + (L::HAS_BIAS || L::HAS_KEY_TERMS || HAS_PAGES));
    for (auto& stage : o_full) {
      for (auto& barrier : stage) mbarrier_init(smem_address(&barrier), 4);
    }
    if constexpr (L::HAS_BIAS) {
      for (auto& ring : bias) ring.init(4);  // warps
      zero = 0.f;
    }
    mbarrier_init_fence();
  }

  // Waits for the record of the next tile.
  __device__ const typename L::Tile& wait_tile(const Ring<FWD_TILE_RECORDS>& record) {
    located.wait_full(record);
    return tiles[record.stage];
  }
};

// The scheduler chooses the tiles and writes their records.
template <class L>
__device__ __forceinline__ void schedule_fwd_tiles(const FlashFwdSm90Params& params,
                                                   FwdShared<L>& shared) {
  const AttentionShape& shape = params.base.shape;
  const TileOrder order(shape, ceil_div(shape.seqlen_q, L::BLOCK_M), shape.heads_q,
                        params.packed_tiles);
  const uint32_t num_tiles = order.size() * params.num_splits;
  Ring<FWD_TILE_RECORDS> record;
  Ring<1> loaded;
  uint32_t index = blockIdx.x;
#pragma unroll 1
  for (;;) {
    typename L::Tile& tile = shared.tiles[record.stage];
    tile.m_rows = 0;
    tile.n_range = {};
    if (index < num_tiles) {
      tile.locate(params.base, order.at(index / params.num_splits), L::BLOCK_M, L::BLOCK_N);
      tile.take_split(index % params.num_splits, params.num_splits);
      if constexpr (HAS_MASK_TILES) tile.skip_empty(params.base, L::BLOCK_M);
      if constexpr (L::FROM_DIAGONAL) tile.turn_to_diagonal(L::BLOCK_N);
    }
    mbarrier_arrive(smem_address(&shared.located.full[record.stage]));
    if (index >= num_tiles) return;
    mbarrier_wait(smem_address(&shared.almost_loaded), loaded.parity);
    index = next_tile_index(params.tile_counter, index, num_tiles);
    loaded.advance();
    record.advance();
  }
}

// The loader of K and V loads in the order in which the consumers read: V one tile behind K.
template <class L>
__device__ __forceinline__ void load_fwd_keys(const FlashFwdSm90Params& params,
                                              FwdShared<L>& shared, uint32_t smem) {
  const AttentionShape& shape = params.base.shape;
  Ring<FWD_TILE_RECORDS> record;
  Ring<L::KV_STAGES> k_ring, v_ring;
#pragma unroll 1
  for (;; record.advance()) {
    const typename L::Tile& tile = shared.wait_tile(record);
    if (tile.m_rows == 0) return;
    const uint32_t almost_loaded = smem_address(&shared.almost_loaded);
    if (!tile.has_keys()) {
      mbarrier_arrive(almost_loaded);
      continue;
    }
    const TensorRows k(params, RowsMap::K, tile.sequence, tile.batch);
    const TensorRows v(params, RowsMap::V, tile.sequence, tile.batch);
    const int head_kv = tile.head / (shape.heads_q / shape.heads_kv);
    const auto load = [&](auto tile_kv, const TensorRows& rows, uint32_t tiles,
                          RingBarriers<L::KV_STAGES>& barriers, Ring<L::KV_STAGES>& ring, int n) {
      using TileKV = decltype(tile_kv);
      if constexpr (L::FROM_DIAGONAL) n = tile.key_tile(n);
      barriers.wait_empty(ring);
      const uint32_t full = smem_address(&barriers.full[ring.stage]);
      mbarrier_arrive_expect(full, TileKV::BYTES);
#pragma unroll
      for (int block = 0; block < TileKV::NUM_BLOCKS; ++block) {
        rows.load(tiles + ring.stage * TileKV::BYTES + block * TileKV::BLOCK_BYTES, full, block,
                  n * L::BLOCK_N, head_kv);
      }
      ring.advance();
    };
    const int n_begin = tile.n_range.begin;
    int n = tile.n_range.end - 1;
    const int n_almost = tile.almost_last();
    load(typename L::TileK(), k, smem + L::K_OFFSET, shared.k, k_ring, n);
#pragma unroll 1
    for (; n > n_begin; HAS_MASK_TILES ? n = tile.next_n(n) : --n) {
      if (n == n_almost) mbarrier_arrive(almost_loaded);
      load(typename L::TileK(), k, smem + L::K_OFFSET, shared.k, k_ring,
           HAS_MASK_TILES ? tile.next_n(n) : n - 1);
      load(typename L::TileV(), v, smem + L::V_OFFSET, shared.v, v_ring, n);
    }
    if (n == n_almost) mbarrier_arrive(almost_loaded);
    load(typename L::TileV(), v, smem + L::V_OFFSET, shared.v, v_ring, n);
  }
}

// The loader of the bias is a lane of its own, so that its waits do not delay K and V. As soon as
// this lane has begun a tile, it lets the scheduler go on.
template <class L>
__device__ __forceinline__ void load_fwd_bias(const FlashFwdSm90Params& params,
                                              FwdShared<L>& shared, uint32_t smem) {
  Ring<FWD_TILE_RECORDS> record;
  Ring<L::BIAS_STAGES> ring;
#pragma unroll 1
  for (;; record.advance()) {
    const typename L::Tile& tile = shared.wait_tile(record);
    if (tile.m_rows == 0) return;
    mbarrier_arrive(smem_address(&shared.almost_loaded));
    const BiasMap bias(params, tile.batch, tile.head);
#pragma unroll 1
    for (int n = tile.n_range.end - 1; n >= tile.n_range.begin; --n, ring.advance()) {
      int place = n;
      if constexpr (L::FROM_DIAGONAL) place = tile.key_tile(n);
#pragma unroll 1
      for (int group = 0; group < L::GROUPS; ++group) {
        bias.template load<typename L::TileBias>(L::bias_address(smem, group, ring.stage),
                                                 shared.bias[group], ring,
                                                 tile.m_begin + group * 64, place * L::BLOCK_N);
      }
    }
  }
}

// One lane loads Q and stores O, which lies in the buffers of Q: as soon as the copy engine has
// read the O of a warpgroup, its buffer is loaded with the Q of the tile Q_STAGES later. With two
// buffers that is a tile ahead, so that the wait for memory is hidden. In a split the consumers
// store O themselves.
template <bool SPLIT, class L>
__device__ __forceinline__ void move_fwd_queries(const FlashFwdSm90Params& params,
                                                 FwdShared<L>& shared, uint32_t smem) {
  Ring<L::Q_STAGES> ring;
  TensorRows q, out;
  int end = 0x7fffffff;  // the number of tiles, as soon as it is known
#pragma unroll 1
  for (int i = 0; i - L::Q_STAGES < end; ++i, ring.advance()) {
    const Ring<FWD_TILE_RECORDS> record = ring_place<FWD_TILE_RECORDS>(i);
    const EveryFwdTile& tile = shared.tiles[record.stage];
    if (i <= end) {
      shared.located.wait_full(record);
      if (tile.m_rows == 0) end = i;
      if (tile.has_keys()) q = TensorRows(params, RowsMap::Q, tile.sequence, tile.batch);
    }
    const EveryFwdTile& computed =
        shared.tiles[ring_place<FWD_TILE_RECORDS>(i - L::Q_STAGES).stage];
    if (i >= L::Q_STAGES) {
      out = TensorRows(params, RowsMap::OUT, computed.sequence, computed.batch);
    }
#pragma unroll 1
    for (int group = 0; group < L::GROUPS; ++group) {
      if (i >= L::Q_STAGES) {
        mbarrier_wait(smem_address(&shared.o_full[ring.stage][group]), ring.parity ^ 1);
        if constexpr (!SPLIT) {
#pragma unroll
          for (int block = 0; block < L::TileO::NUM_BLOCKS; ++block) {
            out.store(L::q_address(smem, ring.stage, group, block), block,
                      computed.m_begin + group * 64, computed.head);
          }
          bulk_commit();
          bulk_wait_read<0>();
        }
      }
      if (i > end) continue;
      // The consumers wait for the Q of every tile, also where there is nothing to load.
      const uint32_t full = smem_address(&shared.q[group].full[ring.stage]);
      if (!tile.has_keys()) {
        mbarrier_arrive(full);
        continue;
      }
      mbarrier_arrive_expect(full, L::TileQ::BYTES / L::GROUPS);
#pragma unroll
      for (int block = 0; block < L::TileQ::NUM_BLOCKS; ++block) {
        q.load(L::q_address(smem, ring.stage, group, block), full, block, tile.m_begin + group * 64,
               tile.head);
      }
    }
    if (i < end) mbarrier_arrive(smem_address(&shared.almost_loaded));
  }
  bulk_wait<0>();
}
