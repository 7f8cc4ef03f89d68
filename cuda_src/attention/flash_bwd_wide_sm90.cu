// The backward of flash_bwd_sm90.cu for wide heads, where dK and dV of 64 keys do not fit the
// registers of one warpgroup: the products are split along the head dimension instead.
//
//   S, dP      each consumer warpgroup has all queries of the tile and a share of the keys; P and
//              dS go through shared memory
//   dV^T, dK^T each warpgroup owns 64 or 128 of the head_dim rows, of all keys of the block:
//              dV^T += dO^T P, dK^T += Q^T dS
//   dQ         the same columns, dQ = dS K; added to the accumulator straight from registers:
//              shared memory has no room for it, and its bandwidth is what this kernel lacks most
//
// dV runs while dS is computed, dK while dQ is added.
//
// Warps. Of warpgroup 0, one lane of warp 0 chooses the next tile, one of warp 1 loads K and Q with
// lse_log2 and delta, one of warp 2 V and dO; with a semaphore, two lanes of warp 3 keep the turns
// (Turns). The other warpgroups are the consumers.
//
// Shared memory. One buffer of K and of V, two of Q and of dO, one of P and of dS.
//
// Why nothing is overwritten too early. Q, K, V and dO have a barrier for "full" and one for
// "empty" (common/ring.cuh). P and dS have one buffer, and each is protected by the barrier of the
// other: dS is written behind P_WRITTEN, which every warpgroup reaches after its products with the
// last dS; P is written behind DS_WRITTEN of the step before, which every warpgroup reaches after
// dV.
//
// Why it ends: as in flash_bwd_sm90.cu. The lanes that keep the turns see the same heads and query
// tiles as the consumers.
#include "../common/wg_gemm.cuh"
#include "../ptx/atomics.cuh"
#include "../ptx/stmatrix.cuh"
#include "bwd_block_sm90.cuh"
#include "score_gradient.cuh"
#include "store_rows.cuh"

enum class NamedBarrier { P_WRITTEN = 1, DS_WRITTEN };

// The tiles of a block and where they lie in shared memory, and the shares of a warpgroup.
template <int HEAD_DIM_, int BLOCK_M_, int BLOCK_N_, int STAGES_, int GROUPS_>
struct BwdWideLayout {
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int BLOCK_N = BLOCK_N_;
  static constexpr int STAGES = STAGES_;
  static constexpr int GROUPS = GROUPS_;  // consumer warpgroups
  static constexpr int CONSUMERS = GROUPS * WARPGROUP;
  static constexpr int KEYS = BLOCK_N / GROUPS;          // of S and dP in a warpgroup
  static constexpr int SLICES = HEAD_DIM / 64 / GROUPS;  // of 64 head_dim rows in a warpgroup
  static constexpr int DQ_COLS = SLICES * 32;
  using TileKV = SmemTile<BLOCK_N, HEAD_DIM>;
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using TileS = SmemTile<BLOCK_M, round_up(BLOCK_N, 64)>;
  static constexpr int V_OFFSET = TileKV::BYTES;
  static constexpr int Q_OFFSET = V_OFFSET + TileKV::BYTES;
  static constexpr int DOUT_OFFSET = Q_OFFSET + STAGES * TileQ::BYTES;
  static constexpr int P_OFFSET = DOUT_OFFSET + STAGES * TileQ::BYTES;
  static constexpr int DS_OFFSET = P_OFFSET + TileS::BYTES;
  static constexpr int BYTES = DS_OFFSET + TileS::BYTES;
  static_assert(BLOCK_M == 64, "one warpgroup has all queries of S");
  static_assert(KEYS * GROUPS == BLOCK_N && KEYS % 16 == 0 && SLICES * GROUPS * 64 == HEAD_DIM,
                "equal shares");
};

// With a semaphore the blocks take turns, query tile by query tile in the order of the keys, so
// that the sum is deterministic. Both are mbarriers.
struct Turns {
  uint64_t come;  // the consumers may add to this tile
  uint64_t over;  // the consumers have added to it

  __device__ void init(int consumers) {
    mbarrier_init(smem_address(&come), 1);
    mbarrier_init(smem_address(&over), consumers / 32);
  }
};

// Two lanes keep the turns, so that no consumer waits for memory: lane 0 waits for the blocks
// before this one, lane 1 lets those after it go on.
template <int BLOCK_M, int BLOCK_N, int STAGES>
__device__ __forceinline__ void keep_turns(const FlashBwdParams& params,
                                           BwdShared<BLOCK_M, STAGES>& shared, Turns& turns) {
  const bool first_lane = threadIdx.x % 32 == 0;
  Ring<BWD_TILE_RECORDS> record;
  Ring<1> turn;
#pragma unroll 1
  for (;; record.advance()) {
    const BwdTile& tile = shared.wait_tile(record);
    if (tile.n_rows == 0) return;
    // A lane that is here no longer reads the record of the last tile.
    mbarrier_arrive(smem_address(&shared.almost_loaded));
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
      for (int m = tile.m_range.end - 1; m >= tile.m_range.begin; --m, turn.advance()) {
        int* flag = turn_flag(params, accum_row(params, tile, head, m * BLOCK_M), BLOCK_M);
        if (first_lane) {
          wait_flag(flag, turn_of_tile(tile, m * BLOCK_M, BLOCK_M, BLOCK_N));
          mbarrier_wait(smem_address(&turns.over), turn.parity ^ 1);  // the turn before
          mbarrier_arrive(smem_address(&turns.come));
        } else {
          mbarrier_wait(smem_address(&turns.over), turn.parity);
          release_flag(flag);
        }
      }
    }
  }
}

// Stores a fragment of a warp whose 16 rows are columns of `out` (dK^T, dV^T): transposes it matrix
// by matrix and writes 32 bytes a key. `out` is the first of the columns in the first key's row.
template <typename T, int N>
__device__ __forceinline__ void store_columns(T* out, int64_t row_stride, const float (&acc)[N][4],
                                              int rows, int columns) {
  static_assert(N % 2 == 0, "a quad exchanges two columns of eight keys");
  const int lane = fresh_thread_index() % 32;  // as in store_rows
  row_stride = opaque(row_stride);
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t words[4];  // (keys n, columns 0-7), (n, 8-15), (n + 1, 0-7), (n + 1, 8-15)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float (&x)[4] = acc[n + j / 2];
      words[j] = movmatrix_trans(pack<T, 90>(x[j % 2 * 2], x[j % 2 * 2 + 1]));
    }
    quad_transpose(words);
    const int row = (n + lane % 4 / 2) * 8 + lane / 4;
    const int column = lane % 2 * 8;
    if (row < rows && column < columns) {
      *reinterpret_cast<uint4*>(out + row * row_stride + column) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// A query tile of one head, in the buffers of `ring`.
template <int STAGES>
struct QueryPlace {
  int head;
  int m;
  Ring<STAGES> ring;
};

// A consumer warpgroup and its steps. The accumulators are not in here, because a struct with
// arrays would not stay in registers.
template <class Options, class L>
struct BwdWideConsumer {
  using T = typename Options::T;
  using TileKV = typename L::TileKV;
  using TileQ = typename L::TileQ;
  using TileS = typename L::TileS;
  using Place = QueryPlace<L::STAGES>;
  using Scores = float[L::KEYS / 8][4];
  using HalfDq = float[L::DQ_COLS / 8][4];
  using Gradient = float[L::SLICES][L::BLOCK_N / 8][4];  // dK^T, dV^T

  const FlashBwdSm90Params& params;
  BwdShared<L::BLOCK_M, L::STAGES>& shared;
  Turns& turns;
  const uint32_t smem;
  // Positions of elements come from threadIdx, not from `group`: it stays in a uniform register,
  // and with it the descriptors. uniform() keeps descriptors in uniform registers, too.
  const int group;

  // ---- S, dP ----

  __device__ __forceinline__ void issue_s(Scores& s, const Place& at) {
    shared.q.wait_full(at.ring);
    wg_gemm<T, L::HEAD_DIM / 16>(
        s, WgRowOperand<TileQ>(smem + L::Q_OFFSET + uniform(at.ring.stage) * TileQ::BYTES, 0),
        WgRowOperand<TileKV>(uniform(smem), group * L::KEYS), OVERWRITE);
  }

  __device__ __forceinline__ void issue_dp(Scores& dp, const Place& at) {
    shared.dout.wait_full(at.ring);
    wg_gemm<T, L::HEAD_DIM / 16>(
        dp, WgRowOperand<TileQ>(smem + L::DOUT_OFFSET + uniform(at.ring.stage) * TileQ::BYTES, 0),
        WgRowOperand<TileKV>(uniform(smem + L::V_OFFSET), group * L::KEYS), OVERWRITE);
  }

  // ---- score, P ----

  // S becomes P.
  __device__ __forceinline__ void make_p(Scores& s, Scores& softcap_slope, const BwdTile& tile,
                                         const Place& at) {
    const Score<Options, FlashBwdParams> score(params.base);
    const int thread = fresh_thread_index();
    const int row = thread % WARPGROUP / 32 * 16 + thread % 32 / 4;
    const int query = at.m * L::BLOCK_M + row;
    const int key = tile.n_begin + (thread / WARPGROUP - 1) * L::KEYS + thread % 4 * 2;
    const float alibi_slope = load_alibi_slope<Options>(params.base, tile.batch, at.head);
    const ScorePlace<Rows::QUERIES> place = {
        tile.sequence, tile.batch, at.head, alibi_slope, params.base.dropout_seed, query, key};
    apply_score(s, softcap_slope, score, place);
    if (uniform(tile.m_range.needs_mask(at.m))) score.apply_mask(s, place);
    const float* lse_log2 = &shared.lse_log2[at.ring.stage][row];
    recompute_weights(s, score, place, [&](int, int i) { return lse_log2[i / 2 * 8]; });
  }

  // ---- dV, dS ----

  // Publishes P, adds to dV, and publishes dS. One product may be in flight before: dP.
  __device__ __forceinline__ void make_ds(Scores& p, Scores& dp, Scores& softcap_slope,
                                          Gradient& acc_dv, const BwdTile& tile, const Place& at) {
    Scores kept;
    store_s(smem + L::P_OFFSET, kept_weights<Options>(kept, p));
    fence_async_proxy();
    // Behind this barrier no warp reads the last dS any more.
    named_barrier_sync(NamedBarrier::P_WRITTEN, L::CONSUMERS);
    const uint32_t dout_stage = smem + L::DOUT_OFFSET + uniform(at.ring.stage) * TileQ::BYTES;
#pragma unroll
    for (int i = 0; i < L::SLICES; ++i) {
      wg_gemm<T, L::BLOCK_M / 16>(acc_dv[i],
                                  WgColumnOperand<TileQ>(dout_stage, group * L::SLICES + i),
                                  WgColumnOperand<TileS>(smem + L::P_OFFSET, 0), ACCUMULATE);
    }
    wgmma_wait<L::SLICES>();
    pin(dp);
    const int row = fresh_thread_index() % WARPGROUP / 32 * 16 + fresh_thread_index() % 32 / 4;
    const float* delta = &shared.delta[at.ring.stage][row];
    softmax_gradient<Options>(dp, p, params.base.shape,
                              [&](int, int i) { return delta[i / 2 * 8]; });
    if constexpr (has_gradient(Options::BIAS)) add_dbias(dp, tile, at);
    apply_softcap_slope<Options>(dp, softcap_slope);
    store_s(smem + L::DS_OFFSET, dp);
    fence_async_proxy();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < L::SLICES; ++i) pin(acc_dv[i]);
    shared.dout.release(at.ring.stage);
    // Behind this barrier no warp reads the last P any more.
    named_barrier_sync(NamedBarrier::DS_WRITTEN, L::CONSUMERS);
  }

  // ---- dQ, in two halves: for all of it beside the next S there are not enough registers ----

  __device__ __forceinline__ void issue_dq(HalfDq& dq, int half) {
    const int column = (group * 2 + half) * L::DQ_COLS;
    wg_gemm<T, L::BLOCK_N / 16>(
        dq, WgRowOperand<TileS>(smem + L::DS_OFFSET, 0),
        WgColumnOperand<TileKV>(uniform(smem) + column % 64 * sizeof(T), column / 64), OVERWRITE);
  }

  __device__ __forceinline__ void add_dq(HalfDq& dq, int half, const BwdTile& tile,
                                         const Place& at) {
    pin(dq);
    const int64_t accum = accum_row(params.base, tile, at.head, at.m * L::BLOCK_M);
    // The ring has two places, so its stage is the parity of the turn.
    if (half == 0 && params.base.dq_semaphore) {
      mbarrier_wait(smem_address(&turns.come), at.ring.stage);
    }
    float* dq_accum = params.base.dq_accum + accum * L::HEAD_DIM +
                      dq_fragment_offset((group * 2 + half) * L::DQ_COLS / 8);
#pragma unroll
    for (int n = 0; n < L::DQ_COLS / 8; ++n) red_add(dq_accum + n * WARPGROUP * 4, dq[n]);
    if (half == 1 && params.base.dq_semaphore) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&turns.over));
    }
  }

  // ---- dK ----

  __device__ __forceinline__ void issue_dk(Gradient& acc_dk, int slice, const Place& at) {
    wg_gemm<T, L::BLOCK_M / 16>(
        acc_dk[slice],
        WgColumnOperand<TileQ>(smem + L::Q_OFFSET + uniform(at.ring.stage) * TileQ::BYTES,
                               group * L::SLICES + slice),
        WgColumnOperand<TileS>(smem + L::DS_OFFSET, 0), ACCUMULATE);
  }

 private:
  // Writes this warpgroup's share of P or dS to its tile in shared memory.
  __device__ __forceinline__ void store_s(uint32_t tile, const Scores& acc) {
    const int thread = fresh_thread_index();
    const int lane = thread % 32;
    const int warp_row = thread % WARPGROUP / 32 * 16;
    const int warp_key = (thread / WARPGROUP - 1) * L::KEYS;
    uint32_t packed[L::KEYS / 16][4];
    wg_pack<T>(packed, acc);
#pragma unroll
    for (int k = 0; k < L::KEYS / 16; ++k) {
      stmatrix_x4(tile + TileS::offset(warp_row + lane % 16, warp_key / 8 + k * 2 + lane / 16),
                  packed[k]);
    }
  }

  __device__ __forceinline__ void add_dbias(const Scores& ds, const BwdTile& tile,
                                            const Place& at) {
    const int thread = fresh_thread_index();
    const int query = at.m * L::BLOCK_M + thread % WARPGROUP / 32 * 16 + thread % 32 / 4;
    const int key = tile.n_begin + (thread / WARPGROUP - 1) * L::KEYS + thread % 4 * 2;
    const ScorePlace<Rows::QUERIES> place = {tile.sequence, tile.batch, at.head, 0.f, 0,
                                             query,         key};
    add_bias_gradient<Options>(ds, params.base, place);
  }
};

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int GROUPS,
          bool SOFTCAP, bool ALIBI, int BIAS, bool DROPOUT, int SMEM_BYTES>
__global__ void __launch_bounds__((GROUPS + 1) * WARPGROUP, 1)
    flash_bwd_wide_sm90(const __grid_constant__ FlashBwdSm90Params params) {
  using Options = ScoreOptions<T, SOFTCAP, ALIBI, static_cast<BiasKind>(BIAS), DROPOUT>;
  using Layout = BwdWideLayout<HEAD_DIM, BLOCK_M, BLOCK_N, NUM_STAGES, GROUPS>;
  using Consumer = BwdWideConsumer<Options, Layout>;
  using TileKV = typename Layout::TileKV;
  using TileQ = typename Layout::TileQ;
  constexpr int CONSUMERS = Layout::CONSUMERS;
  constexpr int SLICES = Layout::SLICES;
  static_assert(Layout::BYTES == SMEM_BYTES, "host and device disagree on shared memory");
  static_assert(NUM_STAGES == 2, "its number is the parity of a turn");
  static_assert(GROUPS == 2 || GROUPS == 3, "the register split is made for two or three");

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_k = smem_address(smem);
  __shared__ BwdShared<BLOCK_M, NUM_STAGES> shared;
  __shared__ Turns turns;
  if (threadIdx.x == 0) {
    shared.init(CONSUMERS, params.base.dq_semaphore ? 4 : 2);
    turns.init(CONSUMERS);
  }
  __syncthreads();

  if (warpgroup_index() == 0) {
    dealloc_registers<GROUPS == 2 ? 40 : 32>();
    const int warp = warp_in_warpgroup();
    if (warp == 3) {
      if (params.base.dq_semaphore && threadIdx.x % 32 < 2) {
        keep_turns<BLOCK_M, BLOCK_N>(params.base, shared, turns);
      }
      return;
    }
    if (!elect_one()) return;
    if (warp == 0) {
      schedule_bwd_tiles(params, shared, BLOCK_N);
    } else if (warp == 1) {
      load_bwd_tiles<TileQ, TileKV, NUM_STAGES>(
          params, shared,
          {RowsMap::K, RowsMap::Q, smem_k, smem_k + Layout::Q_OFFSET, shared.k, shared.q,
           RowConstants::LOAD});
    } else if (warp == 2) {
      load_bwd_tiles<TileQ, TileKV, NUM_STAGES>(
          params, shared,
          {RowsMap::V, RowsMap::DOUT, smem_k + Layout::V_OFFSET, smem_k + Layout::DOUT_OFFSET,
           shared.v, shared.dout, RowConstants::SKIP});
    }
    return;
  }

  // ---- consumers ----
  alloc_registers<GROUPS == 2 ? 232 : 160>();
  const AttentionShape& shape = params.base.shape;
  const int group = warpgroup_index() - 1;
  Ring<BWD_TILE_RECORDS> record;
  typename Consumer::Scores softcap_slope;
  Consumer consumer = {params, shared, turns, smem_k, group};
  typename Consumer::Gradient acc_dk, acc_dv;  // transposed: rows are head_dim, columns are keys
  const auto pin_dk = [&] {
#pragma unroll
    for (int i = 0; i < SLICES; ++i) pin(acc_dk[i]);
  };

  typename Consumer::Place at = {};
#pragma unroll 1
  for (;; record.advance()) {
    const BwdTile& tile = shared.wait_tile(record);
    if (uniform(tile.n_rows) == 0) return;
#pragma unroll
    for (int i = 0; i < SLICES; ++i) {
      set_zero(acc_dk[i]);
      set_zero(acc_dv[i]);
    }
    shared.k.wait_full(kv_place(record));
    shared.v.wait_full(kv_place(record));
    const int head_end = tile.has_queries() ? tile.head_end : tile.head_begin;
#pragma unroll 1
    for (at.head = uniform(tile.head_begin); at.head < uniform(head_end); ++at.head) {
      at.m = uniform(tile.m_range.end) - 1;
      typename Consumer::Scores s, dp;
      consumer.issue_s(s, at);
      consumer.issue_dp(dp, at);
      wgmma_wait<1>();
      pin(s);
      consumer.make_p(s, softcap_slope, tile, at);
      consumer.make_ds(s, dp, softcap_slope, acc_dv, tile, at);
#pragma unroll 1
      for (;;) {
        auto next = at;
        next.ring.advance();
        if (--next.m < uniform(tile.m_range.begin)) break;
        // From this query tile to the next: S and dP of that one beside dQ and dK of this one.
        typename Consumer::Scores s, dp;
        typename Consumer::HalfDq dq0, dq1;
        consumer.issue_dq(dq0, 0);
        consumer.issue_dk(acc_dk, 0, at);
        wgmma_wait<1>();
        consumer.add_dq(dq0, 0, tile, at);
        consumer.issue_dq(dq1, 1);
        if constexpr (SLICES == 2) consumer.issue_dk(acc_dk, 1, at);
        consumer.issue_s(s, next);
        wgmma_wait<SLICES>();
        consumer.add_dq(dq1, 1, tile, at);
        consumer.issue_dp(dp, next);
        wgmma_wait<1>();
        pin(s);
        pin_dk();
        shared.q.release_by_thread(at.ring.stage);
        consumer.make_p(s, softcap_slope, tile, next);
        consumer.make_ds(s, dp, softcap_slope, acc_dv, tile, next);
        at = next;
      }
      typename Consumer::HalfDq dq0, dq1;
      consumer.issue_dq(dq0, 0);
      consumer.issue_dk(acc_dk, 0, at);
      wgmma_wait<1>();
      consumer.add_dq(dq0, 0, tile, at);
      consumer.issue_dq(dq1, 1);
      if constexpr (SLICES == 2) consumer.issue_dk(acc_dk, 1, at);
      wgmma_wait<SLICES - 1>();
      consumer.add_dq(dq1, 1, tile, at);
      wgmma_wait<0>();
      pin_dk();
      shared.q.release_by_thread(at.ring.stage);
      at.ring.advance();
    }
    shared.k.release(0);  // the next tile is loaded while this one is written
    shared.v.release(0);

    // ---- write dK and dV ----
    const int64_t row = tile.sequence.start_k + tile.n_begin;
    const Strides& dk_strides = params.base.dk_strides;
    const Strides& dv_strides = params.base.dv_strides;
    T* dk = static_cast<T*>(params.base.dk) + dk_strides.at(tile.batch, row, tile.head_kv);
    T* dv = static_cast<T*>(params.base.dv) + dv_strides.at(tile.batch, row, tile.head_kv);
#pragma unroll
    for (int i = 0; i < SLICES; ++i) {
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          acc_dk[i][n][j] *= shape.scale;
          if constexpr (DROPOUT) acc_dv[i][n][j] *= shape.dropout_scale;
        }
      }
      const int column = (group * SLICES + i) * 64 + fresh_thread_index() % WARPGROUP / 32 * 16;
      store_columns(dk + column, dk_strides.row, acc_dk[i], tile.n_rows, shape.head_dim - column);
      store_columns(dv + column, dv_strides.row, acc_dv[i], tile.n_rows, shape.head_dim - column);
    }
  }
}
