// A consumer warpgroup of the sm_90 backward kernel: the tiles in shared memory and the step of the
// loop, which is the algorithm. flash_bwd_sm90.cu has the loop and the roles of the other warps.
#pragma once
#include "../common/wg_gemm.cuh"
#include "../ptx/stmatrix.cuh"
#include "bias_tile_sm90.cuh"
#include "bwd_block_sm90.cuh"
#include "score_gradient.cuh"

// DS_WRITTEN: all consumers have written their part of dS. DQ_EMPTY and DQ_FULL: the buffer of dQ
// between the consumers and the reducer may be written, or added to global memory.
enum class NamedBarrier { DS_WRITTEN = 1, DQ_EMPTY, DQ_FULL };

// The tiles of a block and their places in dynamic shared memory.
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
  // Each warpgroup computes a part of dQ: 64 of its rows, or 64 or 32 of its columns.
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

// A consumer warpgroup, which owns 64 keys of the tile. The accumulators are arguments of step(),
// because the compiler breaks a struct up into registers early only if it has no arrays.
template <class Options, class L>
struct BwdConsumer {
  using T = typename Options::T;
  using Gradient = float[L::HEAD_DIM / 8][4];  // dK, dV

  const FlashBwdSm90Params& params;
  BwdShared<L::BLOCK_M, L::STAGES>& shared;
  RingBarriers<1> (&bias_barriers)[L::GROUPS];
  const uint32_t smem;
  // `group` stays in a uniform register, and so do the descriptors that are computed from it. The
  // positions of elements are computed from threadIdx instead.
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

  // One step of the loop: BLOCK_M queries of one head, from m_begin on, and the keys of the tile.
  __device__ __forceinline__ void step(Gradient& acc_dk, Gradient& acc_dv, const BwdTile& tile,
                                       int head, int m_begin, bool masked) {
    using TileKV = typename L::TileKV;
    using TileQ = typename L::TileQ;
    using TileS = typename L::TileS;
    constexpr int BLOCK_M = L::BLOCK_M;
    constexpr bool HAS_DBIAS = has_gradient(Options::BIAS);
    // uniform() keeps descriptors in uniform registers. It also keeps the compiler from computing
    // those of K and V before the loops, which would fill the register file.
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
    wgmma_wait<1>();  // S is complete; dP may still run
    pin(s);

    // ---- score, P ----
    const int column = lane % 4 * 2;
    const int key = tile.n_begin + key_row + lane / 4;
    const int query = m_begin + column;
    const ScorePlace<Rows::KEYS> at = {tile.sequence, tile.batch, head, alibi_slope,
                                       &dropout_seed, key,        query};
    // Reads lse_log2 or delta of the query of element [n][i]. Queries are columns here.
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
    // P is multiplied by the slope of the softcap early, which frees the registers of the slope.
    // But the gradient of the bias needs P without it.
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
    fence_async_proxy();                                         // dS becomes visible to wgmma
    named_barrier_sync(NamedBarrier::DS_WRITTEN, L::CONSUMERS);  // dS is complete
    if constexpr (L::HAS_BIAS_TILES) {
      // An arrival can overtake loads that are still in flight (wait_for_loads), so it must come
      // after the stores of dS, which was computed from the bias.
      bias_barriers[group].release(0);
      bias_ring.advance();
    }
    float dq[L::DQ_COLS / 8][4];
    const int dq_col = L::SPLIT_ROWS ? 0 : group * L::DQ_COLS;
    wg_gemm<T, L::BLOCK_N / 16>(
        dq, WgRowOperand<TileS>(ds_stage, L::SPLIT_ROWS ? group * 64 : 0),
        WgColumnOperand<TileKV>(k_tile + dq_col % 64 * sizeof(T), dq_col / 64), OVERWRITE);
    wgmma_wait<1>();  // dV is complete; dQ may still run
    pin(acc_dv);
    pin(p);
    shared.dout.release(ring.stage);
    wg_gemm<T, BLOCK_M / 16>(acc_dk, ds, WgColumnOperand<TileQ>(q_stage, 0), ACCUMULATE);
    wgmma_wait<1>();  // dQ is complete; dK may still run
    pin(dq);
    hand_over_dq(dq);
    wgmma_wait<0>();
    pin(acc_dk);
    pin(ds);
    shared.q.release_by_thread(ring.stage);
    ring.advance();
  }

 private:
  // Writes this warpgroup's part of dQ to shared memory for the reducer.
  __device__ __forceinline__ void hand_over_dq(const float (&dq)[L::DQ_COLS / 8][4]) {
    // The copy engine has read the last dQ after this barrier.
    named_barrier_sync(NamedBarrier::DQ_EMPTY, L::CONSUMERS + 32);
#pragma unroll
    for (int n = 0; n < L::DQ_COLS / 8; ++n) {
      st_shared_128(
          smem + L::DQ_OFFSET + dq_fragment_offset(group * L::DQ_COLS / 8 + n) * sizeof(float),
          dq[n]);
    }
    fence_async_proxy();  // dQ becomes visible to the copy engine
    named_barrier_arrive(NamedBarrier::DQ_FULL, L::CONSUMERS + 32);
  }
};
