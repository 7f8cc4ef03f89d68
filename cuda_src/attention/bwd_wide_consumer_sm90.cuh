// A consumer warpgroup of the sm_90 backward kernel for wide heads: the tiles in shared memory, its
// steps, and the turns in which blocks add to dQ. flash_bwd_wide_sm90.cu puts them together.
#pragma once
#include "../common/wg_gemm.cuh"
#include "../ptx/atomics.cuh"
#include "../ptx/stmatrix.cuh"
#include "bwd_block_sm90.cuh"
#include "score_gradient.cuh"

enum class NamedBarrier {
  P_WRITTEN = 1,
  DS_WRITTEN,
  DQ_EMPTY_OF_GROUP_0,
  DQ_EMPTY_OF_GROUP_1,
  DQ_FULL_OF_GROUP_0,
  DQ_FULL_OF_GROUP_1
};

// The tiles of a block and their places in dynamic shared memory, and the shares of a warpgroup.
template <int HEAD_DIM_, int BLOCK_M_, int BLOCK_N_, int STAGES_, int GROUPS_>
struct BwdWideLayout {
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int BLOCK_N = BLOCK_N_;
  static constexpr int STAGES = STAGES_;
  static constexpr int GROUPS = GROUPS_;  // consumer warpgroups
  static constexpr int CONSUMERS = GROUPS * WARPGROUP;
  static constexpr int KEYS = BLOCK_N / GROUPS;          // keys of S and dP a warpgroup
  static constexpr int SLICES = HEAD_DIM / 64 / GROUPS;  // slices of 64 head_dim rows a warpgroup
  static constexpr int DQ_COLS = SLICES * 32;
  using TileKV = SmemTile<BLOCK_N, HEAD_DIM>;
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using TileS = SmemTile<BLOCK_M, round_up(BLOCK_N, 64)>;
  // With 80 keys there is room for one stage of dO, and for half of the dQ of one warpgroup; the
  // other warpgroup stages its dQ in the place of P.
  static constexpr bool STAGES_DQ = BLOCK_N == 80;
  static constexpr int DOUT_STAGES = STAGES_DQ ? 1 : STAGES;
  static constexpr int DQ_PART = BLOCK_M * DQ_COLS;  // floats
  using Shared = BwdShared<BLOCK_M, STAGES, DOUT_STAGES>;

  static constexpr int V_OFFSET = TileKV::BYTES;
  static constexpr int Q_OFFSET = V_OFFSET + TileKV::BYTES;
  static constexpr int DOUT_OFFSET = Q_OFFSET + STAGES * TileQ::BYTES;
  static constexpr int P_OFFSET = DOUT_OFFSET + DOUT_STAGES * TileQ::BYTES;
  static constexpr int DS_OFFSET = P_OFFSET + TileS::BYTES;
  static constexpr int DQ_OFFSET = DS_OFFSET + TileS::BYTES;
  static constexpr int BYTES = DQ_OFFSET + (STAGES_DQ ? DQ_PART * sizeof(float) : 0);
  static_assert(!STAGES_DQ || (GROUPS == 2 && DQ_PART * sizeof(float) <= TileS::BYTES),
                "half of a dQ fits in the place of P");
  static_assert(BLOCK_M == 64, "one warpgroup has all queries of S");
  static_assert(KEYS * GROUPS == BLOCK_N && KEYS % 8 == 0 && SLICES * GROUPS * 64 == HEAD_DIM,
                "equal shares");
};

// With a semaphore the blocks add to each query tile in turns, in the order of their keys, so that
// the sum is deterministic. These two mbarriers connect the consumers with the lanes that keep the
// turns.
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
template <int BLOCK_M, int BLOCK_N, class Shared>
__device__ __forceinline__ void keep_turns(const FlashBwdParams& params, Shared& shared,
                                           Turns& turns) {
  const bool first_lane = threadIdx.x % 32 == 0;
  Ring<BWD_TILE_RECORDS> record;
  Ring<1> turn;
#pragma unroll 1
  for (;; record.advance()) {
    const BwdTile& tile = shared.wait_tile(record);
    if (tile.n_rows == 0) return;
    // The lane has begun this tile, so it no longer reads the record of the last one.
    mbarrier_arrive(smem_address(&shared.almost_loaded));
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
      for (int m = tile.m_range.end - 1; m >= tile.m_range.begin; --m, turn.advance()) {
        int* flag = turn_flag(params, accum_row(params, tile, head, m * BLOCK_M), BLOCK_M);
        if (first_lane) {
          wait_flag(flag, turn_of_tile(tile, m * BLOCK_M, BLOCK_M, BLOCK_N));
          mbarrier_wait(smem_address(&turns.over), turn.parity ^ 1);  // of the turn before
          mbarrier_arrive(smem_address(&turns.come));
        } else {
          mbarrier_wait(smem_address(&turns.over), turn.parity);
          release_flag(flag);
        }
      }
    }
  }
}

// The buffers of dQ between the consumers and the reducer. Each warpgroup has one for half of its
// columns. That of warpgroup 0 lies in the place of P, so P must wait for the reducer.
template <class L>
struct StagedDq {
  static constexpr int THREADS = WARPGROUP + 32;  // a consumer warpgroup and the reducer

  __device__ static uint32_t address(uint32_t smem, int group) {
    return smem + (group == 0 ? L::P_OFFSET : L::DQ_OFFSET);
  }
  __device__ static NamedBarrier empty(int group) {
    return static_cast<NamedBarrier>(static_cast<int>(NamedBarrier::DQ_EMPTY_OF_GROUP_0) + group);
  }
  __device__ static NamedBarrier full(int group) {
    return static_cast<NamedBarrier>(static_cast<int>(NamedBarrier::DQ_FULL_OF_GROUP_0) + group);
  }
};

// The reducer is a warp that has the copy engine add the staged halves of dQ to the accumulator.
// With a semaphore the blocks add in turns, in the order of their keys, so that the sum is
// deterministic.
template <class L>
__device__ __forceinline__ void reduce_staged_dq(const FlashBwdParams& params,
                                                 typename L::Shared& shared, uint64_t& p_free,
                                                 uint32_t smem) {
  using Staged = StagedDq<L>;
  const bool elected = elect_one();
  int* flag = nullptr;  // that of the turn that is not over yet
  const auto end_turn = [&] {
    if (!flag) return;
    bulk_wait<0>();
    release_flag(flag);
    flag = nullptr;
  };
#pragma unroll
  for (int group = 0; group < L::GROUPS; ++group) {
    named_barrier_arrive(Staged::empty(group), Staged::THREADS);
  }
  Ring<BWD_TILE_RECORDS> record;
#pragma unroll 1
  for (;; record.advance()) {
    const BwdTile& tile = shared.wait_tile(record);
    if (tile.n_rows == 0) break;
    // A warp that is here no longer reads the record of the last tile.
    if (elected) mbarrier_arrive(smem_address(&shared.almost_loaded));
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
      for (int m = tile.m_range.end - 1; m >= tile.m_range.begin; --m) {
        const int64_t row = accum_row(params, tile, head, m * L::BLOCK_M);
        float* accum = params.dq_accum + row * L::HEAD_DIM;
#pragma unroll 1
        for (int half = 0; half < 2; ++half, accum += L::DQ_PART) {
#pragma unroll
          for (int group = 0; group < L::GROUPS; ++group) {
            named_barrier_sync(Staged::full(group), Staged::THREADS);
            if (!elected) continue;
            if (group == 0 && half == 0 && params.dq_semaphore) {
              end_turn();
              flag = turn_flag(params, row, L::BLOCK_M);
              wait_flag(flag, turn_of_tile(tile, m * L::BLOCK_M, L::BLOCK_M, L::BLOCK_N));
            }
            bulk_reduce_add(accum + group * 2 * L::DQ_PART, Staged::address(smem, group),
                            L::DQ_PART * sizeof(float));
            bulk_commit();
          }
          if (elected) {
            bulk_wait_read<1>();
            if (half == 1) mbarrier_arrive(smem_address(&p_free));
          }
          __syncwarp();
          named_barrier_arrive(Staged::empty(0), Staged::THREADS);
          if (elected) bulk_wait_read<0>();
          __syncwarp();
          named_barrier_arrive(Staged::empty(1), Staged::THREADS);
        }
      }
    }
    if (elected) end_turn();
  }
  if (elected) bulk_wait<0>();  // before the block gives its shared memory back
}

// A query tile of one head, in the buffers of `ring`, and its dO in those of `dout`.
template <int STAGES, int DOUT_STAGES>
struct QueryPlace {
  int head;
  int m;
  Ring<STAGES> ring;
  Ring<DOUT_STAGES> dout;

  __device__ void advance() {
    ring.advance();
    dout.advance();
  }
};

// A consumer warpgroup and its steps. The accumulators are arguments of the steps, because the
// compiler breaks a struct up into registers early only if it has no arrays.
template <class Options, class L>
struct BwdWideConsumer {
  using T = typename Options::T;
  using TileKV = typename L::TileKV;
  using TileQ = typename L::TileQ;
  using TileS = typename L::TileS;
  using Place = QueryPlace<L::STAGES, L::DOUT_STAGES>;
  using Scores = float[L::KEYS / 8][4];
  using HalfDq = float[L::DQ_COLS / 8][4];
  enum Half { FIRST, SECOND };                           // halves of this warpgroup's columns of dQ
  using Gradient = float[L::SLICES][L::BLOCK_N / 8][4];  // dK^T, dV^T

  const FlashBwdSm90Params& params;
  typename L::Shared& shared;
  Turns& turns;
  uint64_t& p_free;  // an mbarrier: no copy reads the place of P any more
  const uint32_t smem;
  // `group` stays in a uniform register, and so do the descriptors that are computed from it, also
  // with the help of uniform(). The positions of elements are computed from threadIdx instead.
  const int group;
  Ring<1> p_ring;

  // ---- S, dP ----

  __device__ __forceinline__ void issue_s(Scores& s, const Place& at) {
    shared.q.wait_full(at.ring);
    wg_gemm<T, L::HEAD_DIM / 16>(
        s, WgRowOperand<TileQ>(smem + L::Q_OFFSET + uniform(at.ring.stage) * TileQ::BYTES, 0),
        WgRowOperand<TileKV>(uniform(smem), group * L::KEYS), OVERWRITE);
  }

  __device__ __forceinline__ void issue_dp(Scores& dp, const Place& at) {
    shared.dout.wait_full(at.dout);
    wg_gemm<T, L::HEAD_DIM / 16>(
        dp, WgRowOperand<TileQ>(smem + L::DOUT_OFFSET + uniform(at.dout.stage) * TileQ::BYTES, 0),
        WgRowOperand<TileKV>(uniform(smem + L::V_OFFSET), group * L::KEYS), OVERWRITE);
  }

  // ---- score, P ----

  // Turns S into P.
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

  // Writes P to shared memory, issues the product for dV, and writes dS. The product for dP may
  // still be in flight when this begins.
  __device__ __forceinline__ void make_ds(Scores& p, Scores& dp, Scores& softcap_slope,
                                          Gradient& acc_dv, const BwdTile& tile, const Place& at) {
    if constexpr (L::STAGES_DQ) {
      mbarrier_wait(smem_address(&p_free), p_ring.parity ^ 1);
      p_ring.advance();
    }
    Scores kept;
    store_s(smem + L::P_OFFSET, kept_weights<Options>(kept, p));
    fence_async_proxy();  // P becomes visible to wgmma
    // After this barrier P is complete, and no warp reads the last dS any more.
    named_barrier_sync(NamedBarrier::P_WRITTEN, L::CONSUMERS);
    const uint32_t dout_stage = smem + L::DOUT_OFFSET + uniform(at.dout.stage) * TileQ::BYTES;
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
    fence_async_proxy();  // dS becomes visible to wgmma
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < L::SLICES; ++i) pin(acc_dv[i]);
    shared.dout.release(at.dout.stage);
    // Behind this barrier no warp reads the last P any more.
    named_barrier_sync(NamedBarrier::DS_WRITTEN, L::CONSUMERS);
  }

  // ---- dQ, in two halves, because all of it beside the next S would need too many registers ----

  __device__ __forceinline__ void issue_dq(HalfDq& dq, Half half) {
    const int column = (group * 2 + half) * L::DQ_COLS;
    wg_gemm<T, L::BLOCK_N / 16>(
        dq, WgRowOperand<TileS>(smem + L::DS_OFFSET, 0),
        WgColumnOperand<TileKV>(uniform(smem) + column % 64 * sizeof(T), column / 64), OVERWRITE);
  }

  __device__ __forceinline__ void add_dq(HalfDq& dq, Half half, const BwdTile& tile,
                                         const Place& at) {
    pin(dq);
    if constexpr (L::STAGES_DQ) {
      using Staged = StagedDq<L>;
      named_barrier_sync(Staged::empty(group), Staged::THREADS);
      const uint32_t stage =
          Staged::address(smem, group) + fresh_thread_index() % WARPGROUP * sizeof(float4);
#pragma unroll
      for (int n = 0; n < L::DQ_COLS / 8; ++n) {
        st_shared_128(stage + n * WARPGROUP * sizeof(float4), dq[n]);
      }
      fence_async_proxy();
      named_barrier_arrive(Staged::full(group), Staged::THREADS);
      return;
    }
    const int64_t accum = accum_row(params.base, tile, at.head, at.m * L::BLOCK_M);
    // The ring has two stages, so the number of the stage is the parity of the turn.
    if (half == FIRST && params.base.dq_semaphore) {
      mbarrier_wait(smem_address(&turns.come), at.ring.stage);
    }
    float* dq_accum = params.base.dq_accum + accum * L::HEAD_DIM +
                      dq_fragment_offset((group * 2 + half) * L::DQ_COLS / 8);
#pragma unroll
    for (int n = 0; n < L::DQ_COLS / 8; ++n) red_add(dq_accum + n * WARPGROUP * 4, dq[n]);
    if (half == SECOND && params.base.dq_semaphore) {
      __syncwarp();  // all lanes have added
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
  // Packs two neighbours in the upper (half 0) or the lower row of a fragment.
  static __device__ __forceinline__ uint32_t pack_pair(const float (&x)[4], int half) {
    return pack<T, 90>(x[2 * half], x[2 * half + 1]);
  }

  // Writes this warpgroup's share of P or dS to its tile in shared memory.
  __device__ __forceinline__ void store_s(uint32_t tile, const Scores& acc) {
    const int thread = fresh_thread_index();
    const int lane = thread % 32;
    const int warp_row = thread % WARPGROUP / 32 * 16;
    const int warp_key = (thread / WARPGROUP - 1) * L::KEYS;
#pragma unroll
    for (int k = 0; k < L::KEYS / 16; ++k) {
      const uint32_t packed[4] = {pack_pair(acc[2 * k], 0), pack_pair(acc[2 * k], 1),
                                  pack_pair(acc[2 * k + 1], 0), pack_pair(acc[2 * k + 1], 1)};
      stmatrix_x4(tile + TileS::offset(warp_row + lane % 16, warp_key / 8 + k * 2 + lane / 16),
                  packed);
    }
    if constexpr (L::KEYS % 16 != 0) {
      constexpr int LAST = L::KEYS / 8 - 1;
      const uint32_t packed[2] = {pack_pair(acc[LAST], 0), pack_pair(acc[LAST], 1)};
      stmatrix_x2(tile + TileS::offset(warp_row + lane % 16, warp_key / 8 + LAST), packed);
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
