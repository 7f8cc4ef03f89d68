// FlashAttention-3 backward on wgmma and TMA (Hopper), head dims up to 128: a persistent block
// takes tiles of BLOCK_N keys of one key head, and walks over the query tiles that see them, of
// every query head of the group. The formulas are in flash_bwd_sm80.cu and score_gradient.cuh.
//
// Warps. Those of warpgroup 0 are the producers and the reducer:
//   warp 0     one lane chooses the next tile and describes it in a record
//   warp 1     one lane loads K, then Q with lse_log2 and delta
//   warp 2     one lane loads V, then dO, and the bias if the copy engine (TMA) can
//   warp 3     one lane has the copy engine add tiles of dQ to the accumulator in global memory
// The other warpgroups are consumers, which own 64 keys each. They compute S and dP transposed
// (rows are keys), so that P^T and dS^T are already operands of dV += P^T dO and dK += dS^T Q, in
// registers; only dS goes through shared memory, for dQ = dS K. dV runs while dS is exchanged
// between the warpgroups, dK while dQ is handed to the reducer.
//
// Shared memory. One buffer of K and of V, two of Q, dO and dS, one of dQ in float32, and with a
// bias by TMA a tile of it for each consumer warpgroup.
//
// Why nothing is overwritten too early. Q, K, V, dO and the bias have a barrier for "full" and one
// for "empty" (common/ring.cuh). dS has two buffers: a warpgroup writes one again two steps later,
// and between the two lies the barrier DS_WRITTEN of the step in between, which every warpgroup
// reaches after its last product with the old one. dQ is written after DQ_EMPTY, at which the
// reducer arrives when the copy engine has read it.
//
// Why it ends. All roles see the same tiles up to the record with n_rows = 0, and in each the same
// heads and query tiles. With a semaphore the blocks add to a query tile in the order of their
// keys, so a block waits for others. It waits only for tiles with earlier tickets, which running
// blocks own; so the earliest tile that is not done never waits.
//
// Sources: FlashAttention-3, arXiv:2407.08608; PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions".
#include "../common/wg_gemm.cuh"
#include "../ptx/atomics.cuh"
#include "../ptx/stmatrix.cuh"
#include "bias_tile_sm90.cuh"
#include "bwd_block_sm90.cuh"
#include "score_gradient.cuh"
#include "store_rows.cuh"

enum class NamedBarrier { DS_WRITTEN = 1, DQ_EMPTY, DQ_FULL };

// The tiles of a block and where they lie in shared memory.
template <class Options, int HEAD_DIM_, int BLOCK_M_, int BLOCK_N_, int STAGES_>
struct BwdLayout {
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int BLOCK_N = BLOCK_N_;
  static constexpr int STAGES = STAGES_;
  static constexpr int GROUPS = BLOCK_N / 64;  // consumer warpgroups
  static constexpr int CONSUMERS = GROUPS * WARPGROUP;
  using TileKV = SmemTile<BLOCK_N, round_up(HEAD_DIM, 64)>;
  using TileQ = SmemTile<BLOCK_M, round_up(HEAD_DIM, 64)>;
  using TileS = SmemTile<BLOCK_M, BLOCK_N>;
  using TileBias = SmemTile<BLOCK_M, 64>;
  static constexpr bool HAS_BIAS_TILES = Options::BIAS == BiasKind::DTYPE_OF_Q_BY_TMA;
  // The part of dQ that a warpgroup computes: 64 rows, or 64 or 32 columns.
  static constexpr bool SPLIT_ROWS = BLOCK_M == 64 * GROUPS;
  static constexpr int DQ_COLS = HEAD_DIM > 64 || SPLIT_ROWS ? 64 : 64 / GROUPS;
  static constexpr int DQ_BYTES = GROUPS * 64 * DQ_COLS * sizeof(float);
  static_assert(SPLIT_ROWS ? HEAD_DIM == 64 : BLOCK_M == 64 && HEAD_DIM <= GROUPS * 64,
                "dQ has one part a warpgroup");

  static constexpr int V_OFFSET = TileKV::BYTES;
  static constexpr int Q_OFFSET = V_OFFSET + TileKV::BYTES;
  static constexpr int DOUT_OFFSET = Q_OFFSET + STAGES * TileQ::BYTES;
  static constexpr int DS_OFFSET = DOUT_OFFSET + STAGES * TileQ::BYTES;
  static constexpr int DQ_OFFSET = DS_OFFSET + STAGES * TileS::BYTES;
  static constexpr int BIAS_OFFSET = DQ_OFFSET + DQ_BYTES;
  static constexpr int BYTES = BIAS_OFFSET + (HAS_BIAS_TILES ? GROUPS * TileBias::BYTES : 0);

  __device__ static uint32_t bias_address(uint32_t smem, int group) {
    return smem + BIAS_OFFSET + group * TileBias::BYTES;
  }
};

// The reducer, a warp: adds the dQ of each query tile to the accumulator. With a semaphore the
// blocks take turns in the order of their keys, so that the sum is deterministic.
template <int HEAD_DIM, int BLOCK_M, int BLOCK_N, int THREADS, int STAGES>
__device__ __forceinline__ void reduce_dq(const FlashBwdParams& params,
                                          BwdShared<BLOCK_M, STAGES>& shared, uint32_t smem_dq) {
  const bool elected = elect_one();
  int* flag = nullptr;  // that of the turn that is not over yet
  // Called late, when the addition has long reached memory.
  const auto end_turn = [&] {
    if (!flag) return;
    bulk_wait<0>();
    release_flag(flag);
    flag = nullptr;
  };
  named_barrier_arrive(NamedBarrier::DQ_EMPTY, THREADS);
  Ring<BWD_TILE_RECORDS> record;
#pragma unroll 1
  for (;; record.advance()) {
    const BwdTile& tile = shared.wait_tile(record);
    if (tile.n_rows == 0) return;
    // A warp that is here no longer reads the record of the last tile.
    if (elected) mbarrier_arrive(smem_address(&shared.almost_loaded));
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
      for (int m = tile.m_range.end - 1; m >= tile.m_range.begin; --m) {
        const int64_t row = accum_row(params, tile, head, m * BLOCK_M);
        named_barrier_sync(NamedBarrier::DQ_FULL, THREADS);
        if (elected) {
          if (params.dq_semaphore) {
            end_turn();
            flag = turn_flag(params, row, BLOCK_M);
            wait_flag(flag, turn_of_tile(tile, m * BLOCK_M, BLOCK_M, BLOCK_N));
          }
          bulk_reduce_add(params.dq_accum + row * HEAD_DIM, smem_dq,
                          BLOCK_M * HEAD_DIM * sizeof(float));
          bulk_commit();
          bulk_wait_read<0>();
        }
        __syncwarp();
        named_barrier_arrive(NamedBarrier::DQ_EMPTY, THREADS);
      }
    }
    if (elected) end_turn();
  }
}

// A consumer warpgroup: it owns 64 keys of the tile. The accumulators of dK and dV are not in here,
// because a struct with arrays would not stay in registers.
template <class Options, class L>
struct BwdConsumer {
  using T = typename Options::T;
  using Gradient = float[L::HEAD_DIM / 8][4];  // dK, dV

  const FlashBwdSm90Params& params;
  BwdShared<L::BLOCK_M, L::STAGES>& shared;
  RingBarriers<1> (&bias_barriers)[L::GROUPS];
  const uint32_t smem;
  // Positions of elements come from threadIdx, not from `group`: it stays in a uniform register,
  // and with it the descriptors.
  const int group;
  const int key_row;  // the first of the warp's 16
  const int lane;
  const Score<Options, FlashBwdParams> score;
  const int64_t dropout_seed;
  Ring<L::STAGES> ring;
  Ring<1> bias_ring;
  Ring<BWD_TILE_RECORDS> record;

  __device__ BwdConsumer(const FlashBwdSm90Params& params, BwdShared<L::BLOCK_M, L::STAGES>& shared,
                         RingBarriers<1> (&bias_barriers)[L::GROUPS], uint32_t smem)
      : params(params),
        shared(shared),
        bias_barriers(bias_barriers),
        smem(smem),
        group(warpgroup_index() - 1),
        key_row((threadIdx.x - WARPGROUP) / 32 * 16),
        lane(threadIdx.x % 32),
        score(params.base),
        dropout_seed(Options::DROPOUT ? *params.base.dropout_seed : 0) {}

  // A step: the queries from m_begin on, of one head, and the keys of the tile.
  __device__ __forceinline__ void step(Gradient& acc_dk, Gradient& acc_dv, const BwdTile& tile,
                                       int head, int m_begin, bool masked) {
    using TileKV = typename L::TileKV;
    using TileQ = typename L::TileQ;
    using TileS = typename L::TileS;
    constexpr int BLOCK_M = L::BLOCK_M;
    constexpr bool HAS_DBIAS = has_gradient(Options::BIAS);
    // uniform() keeps descriptors in uniform registers, and those of K and V from being computed
    // ahead of all loops, which would fill the register file.
    const uint32_t k_tile = uniform(smem);
    const uint32_t v_tile = uniform(smem + L::V_OFFSET);
    const int stage = uniform(ring.stage);
    const uint32_t q_stage = smem + L::Q_OFFSET + stage * TileQ::BYTES;
    const uint32_t dout_stage = smem + L::DOUT_OFFSET + stage * TileQ::BYTES;
    const uint32_t ds_stage = smem + L::DS_OFFSET + stage * TileS::BYTES;
    const float alibi_slope = load_alibi_slope<Options>(params.base, tile.batch, head);

    // ---- S^T = K Q^T, dP^T = V dO^T ----
    float s[BLOCK_M / 8][4];
    float dp[BLOCK_M / 8][4];
    shared.q.wait_full(ring);
    wg_gemm<T, L::HEAD_DIM / 16>(s, WgRowOperand<TileKV>(k_tile, group * 64),
                                 WgRowOperand<TileQ>(q_stage, 0), OVERWRITE);
    shared.dout.wait_full(ring);
    wg_gemm<T, L::HEAD_DIM / 16>(dp, WgRowOperand<TileKV>(v_tile, group * 64),
                                 WgRowOperand<TileQ>(dout_stage, 0), OVERWRITE);
    wgmma_wait<1>();
    pin(s);

    // ---- score, P ----
    const int column = lane % 4 * 2;
    const int key = tile.n_begin + key_row + lane / 4;
    const int query = m_begin + column;
    const ScorePlace<Rows::KEYS> at = {tile.sequence, tile.batch, head, alibi_slope,
                                       &dropout_seed, key,        query};
    // lse_log2 and delta of the query of element [n][i]; queries are columns here.
    const auto constant_of = [&](const float (&constants)[BLOCK_M], int n, int i) {
      const float2 pair = *reinterpret_cast<const float2*>(&constants[n * 8 + column]);
      return i % 2 ? pair.y : pair.x;
    };
    float softcap_slope[BLOCK_M / 8][4];
    apply_score(s, softcap_slope, score, at, [&](float (&s)[BLOCK_M / 8][4], float bias_scale) {
      bias_barriers[group].wait_full(bias_ring);
      add_bias_tile_transposed<typename L::TileBias, T>(s, L::bias_address(smem, group),
                                                        key_row % 64, bias_scale);
    });
    if (masked) score.apply_mask(s, at);
    recompute_weights(s, score, at,
                      [&](int n, int i) { return constant_of(shared.lse_log2[ring.stage], n, i); });
    uint32_t p[BLOCK_M / 16][4];
    float kept[BLOCK_M / 8][4];
    wg_pack<T>(p, kept_weights<Options>(kept, s));
    // P takes the slope of the softcap early, which frees its registers; but dbias is without it.
    if constexpr (!HAS_DBIAS) apply_softcap_slope<Options>(s, softcap_slope);

    // ---- dS ----
    wgmma_wait<0>();
    pin(dp);
    softmax_gradient<Options>(dp, s, params.base.shape, [&](int n, int i) {
      return constant_of(shared.delta[ring.stage], n, i);
    });
    if constexpr (HAS_DBIAS) {
      add_bias_gradient<Options>(dp, params.base, at);
      apply_softcap_slope<Options>(dp, softcap_slope);
    }
    uint32_t ds[BLOCK_M / 16][4];
    wg_pack<T>(ds, dp);
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) {
      stmatrix_x4_trans(
          ds_stage + TileS::offset(k * 16 + lane / 16 * 8 + lane % 8, key_row / 8 + lane / 8 % 2),
          ds[k]);
    }

    // ---- dV += P^T dO, dQ = dS K, dK += dS^T Q ----
    wg_gemm<T, BLOCK_M / 16>(acc_dv, p, WgColumnOperand<TileQ>(dout_stage, 0), ACCUMULATE);
    fence_async_proxy();
    named_barrier_sync(NamedBarrier::DS_WRITTEN, L::CONSUMERS);
    if constexpr (L::HAS_BIAS_TILES) {
      // Not before dS is written, which was computed from the bias: an arrival can overtake loads
      // that are still under way (wait_for_loads).
      bias_barriers[group].release(0);
      bias_ring.advance();
    }
    float dq[L::DQ_COLS / 8][4];
    const int dq_col = L::SPLIT_ROWS ? 0 : group * L::DQ_COLS;
    wg_gemm<T, L::BLOCK_N / 16>(
        dq, WgRowOperand<TileS>(ds_stage, L::SPLIT_ROWS ? group * 64 : 0),
        WgColumnOperand<TileKV>(k_tile + dq_col % 64 * sizeof(T), dq_col / 64), OVERWRITE);
    wgmma_wait<1>();
    pin(acc_dv);
    pin(p);
    shared.dout.release(ring.stage);
    wg_gemm<T, BLOCK_M / 16>(acc_dk, ds, WgColumnOperand<TileQ>(q_stage, 0), ACCUMULATE);
    wgmma_wait<1>();
    pin(dq);
    hand_over_dq(dq);
    wgmma_wait<0>();
    pin(acc_dk);
    pin(ds);
    shared.q.release_by_thread(ring.stage);
    ring.advance();
  }

 private:
  // Writes this warpgroup's part of dQ to where the reducer finds it.
  __device__ __forceinline__ void hand_over_dq(const float (&dq)[L::DQ_COLS / 8][4]) {
    named_barrier_sync(NamedBarrier::DQ_EMPTY, L::CONSUMERS + 32);
#pragma unroll
    for (int n = 0; n < L::DQ_COLS / 8; ++n) {
      st_shared_128(
          smem + L::DQ_OFFSET + dq_fragment_offset(group * L::DQ_COLS / 8 + n) * sizeof(float),
          dq[n]);
    }
    fence_async_proxy();
    named_barrier_arrive(NamedBarrier::DQ_FULL, L::CONSUMERS + 32);
  }
};

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int NUM_STAGES, bool SOFTCAP,
          bool ALIBI, int BIAS, bool DROPOUT, int SMEM_BYTES>
__global__ void __launch_bounds__((BLOCK_N / 64 + 1) * WARPGROUP, 1)
    flash_bwd_sm90(const __grid_constant__ FlashBwdSm90Params params) {
  using Options = ScoreOptions<T, SOFTCAP, ALIBI, static_cast<BiasKind>(BIAS), DROPOUT>;
  using Layout = BwdLayout<Options, HEAD_DIM, BLOCK_M, BLOCK_N, NUM_STAGES>;
  using TileKV = typename Layout::TileKV;
  using TileQ = typename Layout::TileQ;
  constexpr int GROUPS = Layout::GROUPS;
  constexpr int CONSUMERS = Layout::CONSUMERS;
  static_assert(Layout::BYTES == SMEM_BYTES, "host and device disagree on shared memory");
  static_assert(GROUPS == 2, "the register split is made for two consumers");
  static_assert(NUM_STAGES == 2, "one barrier an iteration protects dS only if it has two stages");
  static_assert(ACCUM_ROW_ALIGN % BLOCK_M == 0, "a query tile must not straddle two sequences");

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_k = smem_address(smem);
  __shared__ BwdShared<BLOCK_M, NUM_STAGES> shared;
  __shared__ RingBarriers<1> bias_barriers[GROUPS];
  if (threadIdx.x == 0) {
    if constexpr (Layout::HAS_BIAS_TILES) {
      for (auto& ring : bias_barriers) ring.init(4);  // warps
    }
    shared.init(CONSUMERS, 3);
  }
  __syncthreads();

  if (warpgroup_index() == 0) {
    dealloc_registers<40>();
    const int warp = warp_in_warpgroup();
    if (warp == 0) {
      if (elect_one()) schedule_bwd_tiles(params, shared, BLOCK_N);
    } else if (warp == 1) {
      if (elect_one())
        load_bwd_tiles<TileQ, TileKV, NUM_STAGES>(
            params, shared,
            {RowsMap::K, RowsMap::Q, smem_k, smem_k + Layout::Q_OFFSET, shared.k, shared.q,
             RowConstants::LOAD});
    } else if (warp == 2) {
      Ring<1> bias_ring;
      const auto load_bias = [&](const BwdTile& tile, int head, int m) {
        if constexpr (Layout::HAS_BIAS_TILES) {
          const BiasMap bias(params, tile.batch, head);
#pragma unroll 1
          for (int group = 0; group < GROUPS; ++group) {
            bias.load<typename Layout::TileBias>(Layout::bias_address(smem_k, group),
                                                 bias_barriers[group], bias_ring, m * BLOCK_M,
                                                 tile.n_begin + group * 64);
          }
          bias_ring.advance();
        }
      };
      if (elect_one())
        load_bwd_tiles<TileQ, TileKV, NUM_STAGES>(
            params, shared,
            {RowsMap::V, RowsMap::DOUT, smem_k + Layout::V_OFFSET, smem_k + Layout::DOUT_OFFSET,
             shared.v, shared.dout, RowConstants::SKIP},
            load_bias);
    } else {
      reduce_dq<HEAD_DIM, BLOCK_M, BLOCK_N, CONSUMERS + 32>(params.base, shared,
                                                            smem_k + Layout::DQ_OFFSET);
    }
    return;
  }

  // ---- consumers ----
  alloc_registers<232>();
  const AttentionShape& shape = params.base.shape;
  float acc_dk[HEAD_DIM / 8][4];
  float acc_dv[HEAD_DIM / 8][4];
  BwdConsumer<Options, Layout> consumer(params, shared, bias_barriers, smem_k);
  Ring<BWD_TILE_RECORDS>& record = consumer.record;
#pragma unroll 1
  for (;; record.advance()) {
    const BwdTile& tile = shared.wait_tile(record);
    if (uniform(tile.n_rows) == 0) return;
    set_zero(acc_dk);
    set_zero(acc_dv);
    shared.k.wait_full(kv_place(record));
    shared.v.wait_full(kv_place(record));
    // Masked on both edges of a window, unmasked between them.
    const int head_end = uniform(tile.head_end);
    const int m_begin = uniform(tile.m_range.begin);
    const int inner_begin = max(uniform(tile.m_range.inner_begin), m_begin);
    const int inner_end = uniform(tile.m_range.inner_end);
#pragma unroll 1
    for (int head = uniform(tile.head_begin); head < head_end; ++head) {
#pragma unroll 1
      for (int m = uniform(tile.m_range.end) - 1; m >= m_begin;) {
#pragma unroll 1
        for (; m >= m_begin && (m >= inner_end || m < inner_begin); --m) {
          consumer.step(acc_dk, acc_dv, tile, head, m * BLOCK_M, MASKED);
        }
#pragma unroll 1
        for (; m >= inner_begin; --m)
          consumer.step(acc_dk, acc_dv, tile, head, m * BLOCK_M, UNMASKED);
      }
    }
    shared.k.release(0);  // the next tile is loaded while this one is written
    shared.v.release(0);

    // ---- write dK and dV ----
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc_dk[n][i] *= shape.scale;
        if constexpr (DROPOUT) acc_dv[n][i] *= shape.dropout_scale;
      }
    }
    const int64_t row = tile.sequence.start_k + tile.n_begin + consumer.key_row;
    const Strides& dk_strides = params.base.dk_strides;
    const Strides& dv_strides = params.base.dv_strides;
    store_rows(static_cast<T*>(params.base.dk) + dk_strides.at(tile.batch, row, tile.head_kv),
               dk_strides.row, acc_dk, tile.n_rows - consumer.key_row, shape.head_dim);
    store_rows(static_cast<T*>(params.base.dv) + dv_strides.at(tile.batch, row, tile.head_kv),
               dv_strides.row, acc_dv, tile.n_rows - consumer.key_row, shape.head_dim);
  }
}
