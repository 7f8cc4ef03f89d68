// A consumer warpgroup of the sm_90 backward kernel for wide heads, and its steps, which
// flash_bwd_wide_sm90.cu puts together.
#pragma once
#include "../../common/wg_gemm.cuh"
#include "../../ptx/atomics.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/stmatrix.cuh"
#include "../score_gradient.cuh"
#include "bwd_wide_block.cuh"

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
  using TileK = typename L::TileK;
  using TileV = typename L::TileV;
  using TileQ = typename L::TileQ;
  using TileDout = typename L::TileDout;
  using TileS = typename L::TileS;
  using Place = QueryPlace<L::STAGES, L::DOUT_STAGES>;
  using Scores = float[L::KEYS / 8][4];
  using DqPart = float[L::dq_octets(FIRST)][4];
  using SecondDqPart = float[L::dq_octets(SECOND)][4];
  using GradientK = float[L::DK_SLICES][L::BLOCK_N / 8][4];  // dK^T; a shared slice is the last
  using GradientV = float[L::SLICES][L::BLOCK_N / 8][4];     // dV^T

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
        WgRowOperand<TileK>(uniform(smem), group * L::KEYS), OVERWRITE);
  }

  __device__ __forceinline__ void issue_dp(Scores& dp, const Place& at) {
    shared.dout.wait_full(at.dout);
    wg_gemm<T, L::HEAD_DIM_V / 16>(
        dp,
        WgRowOperand<TileDout>(smem + L::DOUT_OFFSET + uniform(at.dout.stage) * TileDout::BYTES, 0),
        WgRowOperand<TileV>(uniform(smem + L::V_OFFSET), group * L::KEYS), OVERWRITE);
  }

  // ---- score, P ----

  // Turns S into P.
  __device__ __forceinline__ void make_p(Scores& s, Scores& slope,
                                         const typename L::Shared::BlockTile& tile,
                                         const Place& at) {
    const Score<Options, FlashBwdParams> score(params.base);
    const int thread = fresh_thread_index();
    const int row = thread % WARPGROUP / 32 * 16 + thread % 32 / 4;
    const int query = at.m * L::BLOCK_M + row;
    const int key = tile.n_begin + (thread / WARPGROUP - 1) * L::KEYS + thread % 4 * 2;
    const float alibi_slope = load_alibi_slope<Options>(params.base, tile.batch, at.head);
    const ScorePlace<Rows::QUERIES> place = {
        tile.sequence, tile.batch, at.head, alibi_slope, params.base.dropout_seed, query, key};
    if constexpr (HAS_MASK_TILES) {
      apply_score(s, slope, score, place, NoBiasTile(), uniform(tile.needs_mask(at.m)),
                  Tanhs::BY_FOURS_WITHOUT_NAN);
      if (!uniform(tile.row.is_full(at.m))) {
        SeenScores<L::KEYS / 8> seen;
        seen.template load<false>(params.base, tile, at.m, row / 16 * L::GROUPS + group,
                                  query - row % 16, tile.n_begin + group * L::KEYS);
        score.apply_seen(s, seen);
      }
    } else {
      apply_score(s, slope, score, place, NoBiasTile(), MASKED, Tanhs::BY_FOURS_WITHOUT_NAN);
    }
    if (uniform(tile.m_range.needs_mask(at.m))) score.apply_mask(s, place);
    const float* lse_log2 = &shared.lse_log2[at.ring.stage][row];
    recompute_weights(s, score, place, [&](int, int i) { return lse_log2[i / 2 * 8]; });
  }

  // ---- dV, dS ----

  // Writes P to shared memory, issues the product for dV, and writes dS. The product for dP may
  // still be in flight when this begins.
  __device__ __forceinline__ void make_ds(Scores& p, Scores& dp, Scores& slope, GradientV& acc_dv,
                                          const BwdTile& tile, const Place& at) {
    if constexpr (L::DQ_IN_P) {
      mbarrier_wait(smem_address(&p_free), p_ring.parity ^ 1);
      p_ring.advance();
    }
    Scores kept;
    store_s(smem + L::P_OFFSET, kept_weights<Options>(kept, p));
    fence_async_proxy();  // P becomes visible to wgmma
    // After this barrier P is complete, and no warp reads the last dS any more.
    named_barrier_sync(NamedBarrier::P_WRITTEN, L::CONSUMERS);
    const uint32_t dout_stage = smem + L::DOUT_OFFSET + uniform(at.dout.stage) * TileDout::BYTES;
#pragma unroll
    for (int i = 0; i < L::SLICES; ++i) {
      wg_gemm<T, L::BLOCK_M / 16>(acc_dv[i],
                                  WgColumnOperand<TileDout>(dout_stage, group * L::SLICES + i),
                                  WgColumnOperand<TileS>(smem + L::P_OFFSET, 0), ACCUMULATE);
    }
    wgmma_wait<L::SLICES>();
    pin(dp);
    const int row = fresh_thread_index() % WARPGROUP / 32 * 16 + fresh_thread_index() % 32 / 4;
    const float* delta = &shared.delta[at.ring.stage][row];
    softmax_gradient<Options>(dp, p, params.base.shape,
                              [&](int, int i) { return delta[i / 2 * 8]; });
    if constexpr (has_gradient(Options::BIAS)) add_dbias(dp, tile, at);
    apply_slope<Options>(dp, slope);
    store_s(smem + L::DS_OFFSET, dp);
    fence_async_proxy();  // dS becomes visible to wgmma
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < L::SLICES; ++i) pin(acc_dv[i]);
    shared.dout.release(at.dout.stage);
    // No warp reads the last P any more behind this barrier.
    named_barrier_sync(NamedBarrier::DS_WRITTEN, L::CONSUMERS);
  }

  // ---- dQ, in two parts, because all of it beside the next S would need too many registers ----

  // The registers of the second part: those of the first, if it has as many columns.
  static __device__ __forceinline__ auto& second_part(DqPart& first, SecondDqPart& second) {
    if constexpr (L::SHARED_SLICE) {
      return second;
    } else {
      return first;
    }
  }

  template <int OCTETS>
  __device__ __forceinline__ void issue_dq(float (&dq)[OCTETS][4], Part part) {
    const int column = L::first_dq_octet(part, group) * 8;
    wg_gemm<T, L::BLOCK_N / 16>(
        dq, WgRowOperand<TileS>(smem + L::DS_OFFSET, 0),
        WgColumnOperand<TileK>(uniform(smem) + column % 64 * sizeof(T), column / 64), OVERWRITE);
  }

  template <int OCTETS>
  __device__ __forceinline__ void add_dq(float (&dq)[OCTETS][4], Part part, const BwdTile& tile,
                                         const Place& at) {
    pin(dq);
    if constexpr (L::STAGES_DQ) {
      using Staged = StagedDq<L>;
      named_barrier_sync(Staged::empty(group, part), Staged::THREADS);
      const uint32_t stage =
          Staged::address(smem, group, part) + fresh_thread_index() % WARPGROUP * sizeof(float4);
#pragma unroll
      for (int n = 0; n < OCTETS; ++n) {
        st_shared_128(stage + n * WARPGROUP * sizeof(float4), dq[n]);
      }
      fence_async_proxy();
      named_barrier_arrive(Staged::full(group, part), Staged::THREADS);
      return;
    }
    const int64_t accum = accum_row(params.base, tile, at.head, at.m * L::BLOCK_M);
    // The ring has two stages, so the number of the stage is the parity of the turn.
    if (part == FIRST && params.base.dq_semaphore) {
      mbarrier_wait(smem_address(&turns.come), at.ring.stage);
    }
    float* dq_accum = params.base.dq_accum + accum * L::HEAD_DIM +
                      dq_fragment_offset(L::first_dq_octet(part, group));
#pragma unroll
    for (int n = 0; n < OCTETS; ++n) red_add(dq_accum + n * WARPGROUP * 4, dq[n]);
    if (part == SECOND && params.base.dq_semaphore) {
      __syncwarp();  // all lanes have added
      if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&turns.over));
    }
  }

  // ---- dK ----

  __device__ __forceinline__ void issue_dk(GradientK& acc_dk, int slice, const Place& at) {
    const uint32_t q_stage = smem + L::Q_OFFSET + uniform(at.ring.stage) * TileQ::BYTES;
    if (slice < L::SLICES) {
      wg_gemm<T, L::BLOCK_M / 16>(acc_dk[slice],
                                  WgColumnOperand<TileQ>(q_stage, group * L::SLICES + slice),
                                  WgColumnOperand<TileS>(smem + L::DS_OFFSET, 0), ACCUMULATE);
      return;
    }
    if constexpr (!L::SHARED_SLICE) return;
    constexpr int QUERIES = L::BLOCK_M / L::GROUPS;  // of this warpgroup in a shared slice
    wg_gemm<T, QUERIES / 16>(
        acc_dk[slice],
        WgColumnOperand<TileQ>(q_stage + group * QUERIES * TileQ::ROW_BYTES, L::SLICES * L::GROUPS),
        WgColumnOperand<TileS>(smem + L::DS_OFFSET + group * QUERIES * TileS::ROW_BYTES, 0),
        ACCUMULATE);
  }

  // Adds up the shared slice of dK^T. Each of two warpgroups keeps the sum of its own half of the
  // keys (the first warpgroup that of the first keys), and hands its part of the other half over.
  // The first warpgroup gets its own in the place of P, the second in that of dS. All products with
  // dS must be over.
  using HalfSlice = float[L::BLOCK_N / 16][4];
  __device__ __forceinline__ void exchange_shared_slice(HalfSlice& sum,
                                                        const float (&acc)[L::BLOCK_N / 8][4]) {
    constexpr int HALF = L::BLOCK_N / 16;
    const uint32_t place = smem + fresh_thread_index() % WARPGROUP * sizeof(float4);
    named_barrier_sync(NamedBarrier::DK_EXCHANGED, L::CONSUMERS);  // nobody reads dS any more
    const uint32_t theirs = place + (group == 0 ? L::DS_OFFSET : L::P_OFFSET);
#pragma unroll
    for (int n = 0; n < HALF; ++n) {
      float other[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[n][i] = group == 0 ? acc[n][i] : acc[n + HALF][i];
        other[i] = group == 0 ? acc[n + HALF][i] : acc[n][i];
      }
      st_shared_128(theirs + n * WARPGROUP * sizeof(float4), other);
    }
    named_barrier_sync(NamedBarrier::DK_EXCHANGED, L::CONSUMERS);
    const uint32_t own = place + (group == 0 ? L::P_OFFSET : L::DS_OFFSET);
#pragma unroll
    for (int n = 0; n < HALF; ++n) {
      const uint4 other = ld_shared_128(own + n * WARPGROUP * sizeof(float4));
      sum[n][0] += __uint_as_float(other.x);
      sum[n][1] += __uint_as_float(other.y);
      sum[n][2] += __uint_as_float(other.z);
      sum[n][3] += __uint_as_float(other.w);
    }
    // The next P and dS may be written behind this barrier.
    named_barrier_sync(NamedBarrier::DK_EXCHANGED, L::CONSUMERS);
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
