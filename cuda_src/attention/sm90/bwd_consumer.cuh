// A consumer warpgroup of the sm_90 backward kernel: its tiles in shared memory, the steps of the
// algorithm, and the loops over query tiles. flash_bwd_sm90.cu has the roles of the other warps.
#pragma once
#include "../../common/wg_gemm.cuh"
#include "../../ptx/stmatrix.cuh"
#include "../score_gradient.cuh"
#include "bias_tile.cuh"
#include "bwd_layout.cuh"
#include "stored_gradient.cuh"

// A consumer warpgroup, which owns 64 keys of the tile. The accumulators are arguments of step(),
// because the compiler breaks a struct up into registers early only if it has no arrays.
template <class Options, class L>
struct BwdConsumer {
  using Layout = L;
  using T = typename Options::T;
  using BlockTile = typename L::BlockTile;
  using TileKV = typename L::TileKV;
  using TileQ = typename L::TileQ;
  using Scores = float[L::BLOCK_M / 8][4];       // S, dP
  using Operand = uint32_t[L::BLOCK_M / 16][4];  // P, dS
  using Gradient = float[L::HEAD_DIM / 8][4];    // dK, dV
  using Seen = SeenScores<L::BLOCK_M / 8>;
  using Constants = ConstantsAhead<L>;
  using OwnParts = text::OwnParts<L::HAS_PARTS ? L::BLOCK_M / 8 : 0>;

  const FlashBwdSm90Params& params;
  typename L::Shared& shared;
  // The barriers of a warpgroup's tile of the bias, and those of its part of the dQ of whole heads.
  RingBarriers<1> (&bias_barriers)[L::GROUPS];
  RingBarriers<1> (&dq_barriers)[L::GROUPS];
  const uint32_t smem;
  // `group` stays in a uniform register, and so do the descriptors that are computed from it. The
  // positions of elements are computed from threadIdx instead.
  const int group;
  const int key_row;  // the first of the warp's 16
  const int lane;
  const Score<Options, FlashBwdParams> score;
  const int64_t dropout_seed;
  const FarDistances far;
  int seqlen_q, seqlen_k;  // only with parts of a text, and without far tiles
  Ring<L::STAGES> ring;
  Ring<1> bias_ring, dq_ring;
  Ring<BWD_TILE_RECORDS> record;

  __device__ BwdConsumer(const FlashBwdSm90Params& params, typename L::Shared& shared,
                         RingBarriers<1> (&bias_barriers)[L::GROUPS],
                         RingBarriers<1> (&dq_barriers)[L::GROUPS], uint32_t smem)
      : params(params),
        shared(shared),
        bias_barriers(bias_barriers),
        dq_barriers(dq_barriers),
        smem(smem),
        group(warpgroup_index() - 1),
        key_row((threadIdx.x - WARPGROUP) / 32 * 16),
        lane(threadIdx.x % 32),
        score(params.base),
        dropout_seed(Options::DROPOUT ? *params.base.dropout_seed : 0),
        far(text::far_or_none(params.base)) {}

  // ---- the steps of the algorithm, for the query tile at m_begin of one head ----

  // Issues S^T = K Q^T. uniform() keeps descriptors in uniform registers. It also keeps the
  // compiler from computing those of K and V before the loops, which would fill the register file.
  __device__ __forceinline__ void issue_s(Scores& s, const Ring<L::STAGES>& at) {
    wg_gemm<T, L::HEAD_DIM / 16>(s, WgRowOperand<TileKV>(uniform(smem), group * 64),
                                 WgRowOperand<TileQ>(q_address(at), 0), OVERWRITE);
  }

  // Issues dP^T = V dO^T.
  __device__ __forceinline__ void issue_dp(Scores& dp, const Ring<L::STAGES>& at) {
    shared.dout.wait_full(at);
    wg_gemm<T, L::HEAD_DIM / 16>(dp, WgRowOperand<TileKV>(uniform(smem + L::V_OFFSET), group * 64),
                                 WgRowOperand<TileQ>(dout_address(at), 0), OVERWRITE);
  }

  // Turns S, which is complete, into P, and dP, after a wait, into dS. Leaves both as operands of
  // the next products, and writes dS to shared memory, too.
  __device__ __forceinline__ void make_p_and_ds(Operand& p, Operand& ds, Scores& s, Scores& dp,
                                                const Constants& lse_log2, const Constants& delta,
                                                const Seen& seen, const text::CommonShift& shift,
                                                const BwdTile& tile, int head, int m_begin,
                                                const Ring<L::STAGES>& place, bool masked) {
    using TileS = typename L::TileS;
    constexpr int BLOCK_M = L::BLOCK_M;
    constexpr bool HAS_DBIAS = has_gradient(Options::BIAS);
    const float alibi_slope = load_alibi_slope<Options>(params.base, tile.batch, head);
    const int column = lane % 4 * 2;
    const ScorePlace<Rows::KEYS> at = place_of(tile, head, m_begin, alibi_slope);
    float slope[BLOCK_M / 8][4];
    const auto add_bias = [&](Scores& s, float bias_scale) {
      bias_barriers[group].wait_full(bias_ring);
      add_bias_tile_transposed<typename L::TileBias, T>(s, L::bias_address(smem, group),
                                                        key_row % 64, bias_scale);
    };
    // The polynomial spills at larger head dims.
    constexpr Tanhs TANHS = L::HEAD_DIM <= 64 ? Tanhs::SMALL_APART : Tanhs::BY_FOURS_WITHOUT_NAN;
    if constexpr (L::HAS_PARTS) {
      if (!(L::HAS_FAR && shift.exists))
        apply_score_of_parts(s, slope, score, at, text::load_parts(shared_parts(), lane), add_bias,
                             masked);
    } else {
      apply_score(s, slope, score, at, add_bias, masked, TANHS);
    }
    if (masked) {
      score.apply_seen(s, seen);
      if (!HAS_MASK_TILES || uniform(tile.m_range.needs_mask(m_begin / BLOCK_M)))
        score.apply_mask(s, at);
    }
    // Where all scores of a tile have the same shift, the exponential adds it.
    CommonTerm term = {1.f, 0.f};
    if constexpr (L::HAS_FAR) {
      if (shift.exists)
        term = {score.inner,
                text::shift_of_zero(shift, at.batch, at.head, params.base) * score.scale_log2};
    }
    recompute_weights(
        s, score, at,
        [&](int n, int i) {
          return constant_of<L>(lse_log2, shared.lse_log2[place.stage], n, i, column) - term.term;
        },
        term.factor);
    float kept[BLOCK_M / 8][4];
    wg_pack<T>(p, kept_weights<Options>(kept, s));
    // P is multiplied by the slope of the score early, which frees the registers of the slope.
    // The gradient of the bias needs P without it, and so does dropout, which marks P by a sign,
    // where the slope may be negative. A slope of parts alone waits in shared memory.
    constexpr bool SLOPE_OF_PARTS = L::HAS_PARTS && has_part(TextParts::SLOPE);
    constexpr bool EARLY = !HAS_DBIAS && !(Options::DROPOUT && HAS_USER_SCORE) && !SLOPE_OF_PARTS;
    if constexpr (EARLY) apply_slope<Options>(s, slope);

    wgmma_wait<0>();
    pin(dp);
    if constexpr (SLOPE_OF_PARTS) {
      slope_of_parts(slope, score, at.again(), text::load_parts(shared_parts(), opaque(lane)),
                     masked);
    }
    // P * (slope * dP - slope * delta) takes no instruction more than P * (dP - delta).
    constexpr bool INSIDE = SLOPE_OF_PARTS && !HAS_DBIAS;
    if constexpr (INSIDE) apply_slope<Options>(dp, slope);
    softmax_gradient<Options>(dp, s, params.base.shape, [&](int n, int i) {
      const float x = constant_of<L>(delta, shared.delta[place.stage], n, i, column);
      return INSIDE ? x * slope[n][i] : x;
    });
    if constexpr (HAS_DBIAS) add_bias_gradient<Options>(dp, params.base, at);
    if constexpr (!EARLY && !INSIDE) apply_slope<Options>(dp, slope);
    wg_pack<T>(ds, dp);
    const uint32_t ds_stage = ds_address(place);
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) {
      stmatrix_x4_trans(
          ds_stage + TileS::offset(k * 16 + lane / 16 * 8 + lane % 8, key_row / 8 + lane / 8 % 2),
          ds[k]);
    }
  }

  // Computes dV += P^T dO and dQ = dS K, which goes to the reducer, and issues dK += dS^T Q.
  __device__ __forceinline__ void issue_gradients(Gradient& acc_dk, Gradient& acc_dv, Operand& p,
                                                  Operand& ds, const BlockTile& tile, int head,
                                                  int m_begin, const Ring<L::STAGES>& at) {
    using TileS = typename L::TileS;
    wg_gemm<T, L::BLOCK_M / 16>(acc_dv, p, WgColumnOperand<TileQ>(dout_address(at), 0), ACCUMULATE);
    fence_async_proxy();  // dS becomes visible to wgmma
    named_barrier_sync(NamedBarrier::DS_WRITTEN, L::CONSUMERS);
    if constexpr (L::HAS_BIAS_TILES) {
      // An arrival can overtake loads that are still in flight (wait_for_loads), so it must come
      // after the stores of dS, which was computed from the bias.
      bias_barriers[group].release(0);
      bias_ring.advance();
    }
    float dq[L::DQ_COLS / 8][4];
    const int dq_col = L::SPLIT_ROWS ? 0 : group * L::DQ_COLS;
    wg_gemm<T, L::BLOCK_N / 16>(
        dq, WgRowOperand<TileS>(ds_address(at), L::SPLIT_ROWS ? group * 64 : 0),
        WgColumnOperand<TileKV>(uniform(smem) + dq_col % 64 * sizeof(T), dq_col / 64), OVERWRITE);
    wgmma_wait<1>();  // dV is complete; dQ may still run
    pin(acc_dv);
    pin(p);
    shared.dout.release(at.stage);
    wg_gemm<T, L::BLOCK_M / 16>(acc_dk, ds, WgColumnOperand<TileQ>(q_address(at), 0), ACCUMULATE);
    wgmma_wait<1>();  // dQ is complete; dK may still run
    pin(dq);
    if constexpr (L::WHOLE_HEADS) {
      finish_dq(*this, dq, tile, head, m_begin);
      return;
    }
    hand_over_dq(dq);
  }

  // Gives Q back; dK is complete.
  __device__ __forceinline__ void end_gradients(Gradient& acc_dk, Operand& ds,
                                                const Ring<L::STAGES>& at) {
    pin(acc_dk);
    pin(ds);
    shared.q.release_by_thread(at.stage);
  }

  // ---- loops over query tiles ----

  // Walks over the query tiles of a head. Those on either edge of a window need the mask.
  __device__ __forceinline__ void steps(Gradient& acc_dk, Gradient& acc_dv, const BlockTile& tile,
                                        int head) {
    OwnParts own_parts;
    text::begin_head(*this, own_parts, tile, head);
    if constexpr (HAS_MASK_TILES) {
#pragma unroll 1
      for (int m = uniform(tile.first_m()); tile.is_m(m);) {
        const TileRun run = tile.row.run_up_to(m, tile.m_range);
        const int begin = uniform(run.begin);
        const bool masked = uniform(run.masked);
#pragma unroll 1
        for (m = uniform(run.last); m >= begin; --m)
          step(acc_dk, acc_dv, tile, head, m * L::BLOCK_M, m, own_parts, masked);
      }
    } else if constexpr (L::WALKS_UP) {
#pragma unroll 1
      for (int m = uniform(tile.m_range.begin); m < uniform(tile.m_range.end); ++m)
        step(acc_dk, acc_dv, tile, head, m * L::BLOCK_M,
             L::HAS_PARTS ? min(m + 1, uniform(tile.m_range.end) - 1) : m, own_parts,
             uniform(tile.m_range.needs_mask(m)));
    } else {
      const int m_begin = uniform(tile.m_range.begin);
      const int inner_begin = max(uniform(tile.m_range.inner_begin), m_begin);
      const int inner_end = uniform(tile.m_range.inner_end);
      const auto step_at = [&](int m, bool masked) {
        step(acc_dk, acc_dv, tile, head, m * L::BLOCK_M, max(m - 1, m_begin), own_parts, masked);
      };
#pragma unroll 1
      for (int m = uniform(tile.m_range.end) - 1; m >= m_begin;) {
#pragma unroll 1
        for (; m >= m_begin && (m >= inner_end || m < inner_begin); --m) step_at(m, MASKED);
#pragma unroll 1
        for (; m >= inner_begin; --m) step_at(m, UNMASKED);
      }
    }
  }

  __device__ __forceinline__ void step(Gradient& acc_dk, Gradient& acc_dv, const BlockTile& tile,
                                       int head, int m_begin, int next_m, OwnParts& own_parts,
                                       bool masked) {
    Scores s, dp;
    Constants lse_log2, delta;
    Operand p, ds;
    Seen seen;
    if constexpr (HAS_MASK_TILES) {
      if (masked) {
        seen.template load<true>(params.base, tile, m_begin / L::BLOCK_M, key_row / 16,
                                 tile.n_begin + key_row, m_begin);
      }
    }
    const int stage = ring.stage;
    shared.q.wait_full(ring);
    if constexpr (L::CONSTANTS_AHEAD) {
      load_constants<L>(lse_log2, shared.lse_log2[ring.stage]);
      load_constants<L>(delta, shared.delta[ring.stage]);
    }
    issue_s(s, ring);
    issue_dp(dp, ring);
    const text::CommonShift shift =
        text::share_query_tile(*this, own_parts, tile, head, m_begin / L::BLOCK_M, next_m);
    wgmma_wait<1>();
    pin(s);
    make_p_and_ds(p, ds, s, dp, lse_log2, delta, seen, shift, tile, head, m_begin, ring, masked);
    text::compute_next_query_tile(*this, own_parts, tile, head, next_m);
    issue_gradients(acc_dk, acc_dv, p, ds, tile, head, m_begin, ring);
    wgmma_wait<0>();
    end_gradients(acc_dk, ds, ring);
    ring.advance();
    if constexpr (stores_gradient(Options::BIAS))
      store_bias_gradient<T, L>(params.base, smem, group, tile, head, m_begin, stage);
  }

  // Does the same, and issues S of the next tile before it waits for dK of this one.
  __device__ __forceinline__ void overlapped_steps(Gradient& acc_dk, Gradient& acc_dv,
                                                   const BlockTile& tile, int head) {
    constexpr int EARLIER = L::WALKS_UP ? -L::BLOCK_M : L::BLOCK_M;
    Operand p, ds;
    int m = L::WALKS_UP ? uniform(tile.m_range.begin) : uniform(tile.m_range.end) - 1;
    {
      Scores s, dp;
      shared.q.wait_full(ring);
      issue_s(s, ring);
      make_next(p, ds, s, dp, tile, head, m, ring);
    }
#pragma unroll 1
    while (L::WALKS_UP ? ++m < uniform(tile.m_range.end) : --m >= uniform(tile.m_range.begin)) {
      Ring<L::STAGES> next = ring;
      next.advance();
      issue_gradients(acc_dk, acc_dv, p, ds, tile, head, m * L::BLOCK_M + EARLIER, ring);
      Scores s, dp;
      shared.q.wait_full(next);
      issue_s(s, next);
      wgmma_wait<1>();
      end_gradients(acc_dk, ds, ring);
      make_next(p, ds, s, dp, tile, head, m, next);
      ring = next;
    }
    issue_gradients(acc_dk, acc_dv, p, ds, tile, head, m * L::BLOCK_M + EARLIER, ring);
    wgmma_wait<0>();
    end_gradients(acc_dk, ds, ring);
    ring.advance();
  }

  // The address of eight columns of this warpgroup's part of dQ.
  __device__ uint32_t dq_address(int octet) const {
    return smem + L::DQ_OFFSET + dq_fragment_offset(group * L::DQ_COLS / 8 + octet) * sizeof(float);
  }

  // Where the parts of a text lie that the scores of a tile share.
  __device__ __forceinline__ auto& shared_parts() const { return shared.parts[key_row / 16]; }

  // The place of a lane's scores of a query tile.
  __device__ ScorePlace<Rows::KEYS> place_of(const BwdTile& tile, const int& head, int m_begin,
                                             const float& alibi_slope) const {
    const int key = tile.n_begin + key_row + lane / 4, query = m_begin + lane % 4 * 2;
    return {tile.sequence, tile.batch, head, alibi_slope, &dropout_seed, key, query};
  }

 private:
  __device__ uint32_t q_address(const Ring<L::STAGES>& at) const {
    return smem + L::Q_OFFSET + uniform(at.stage) * TileQ::BYTES;
  }
  __device__ uint32_t dout_address(const Ring<L::STAGES>& at) const {
    return smem + L::DOUT_OFFSET + uniform(at.stage) * TileQ::BYTES;
  }
  __device__ uint32_t ds_address(const Ring<L::STAGES>& at) const {
    return smem + L::DS_OFFSET + uniform(at.stage) * L::TileS::BYTES;
  }

  // Makes P and dS of a tile whose S is in flight.
  __device__ __forceinline__ void make_next(Operand& p, Operand& ds, Scores& s, Scores& dp,
                                            const BwdTile& tile, int head, int m,
                                            const Ring<L::STAGES>& at) {
    issue_dp(dp, at);
    wgmma_wait<1>();
    pin(s);
    make_p_and_ds(p, ds, s, dp, {}, {}, {}, {}, tile, head, m * L::BLOCK_M, at,
                  uniform(tile.m_range.needs_mask(m)));
  }

  // Writes this warpgroup's part of dQ to shared memory for the reducer.
  __device__ __forceinline__ void hand_over_dq(const float (&dq)[L::DQ_COLS / 8][4]) {
    // The copy engine has read the last dQ when the reducer arrives here.
    named_barrier_sync(dq_empty(group), DQ_THREADS);
#pragma unroll
    for (int n = 0; n < L::DQ_COLS / 8; ++n) st_shared_128(dq_address(n), dq[n]);
    fence_async_proxy();  // dQ becomes visible to the copy engine
    named_barrier_arrive(dq_full(group), DQ_THREADS);
  }
};
