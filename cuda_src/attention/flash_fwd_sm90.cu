// Attention forward on wgmma and TMA (Hopper): a persistent block takes query tiles of BLOCK_M rows
// one after the other, and walks over the key tiles of each from the last to the first.
//
//   producers  warpgroup 0: a lane chooses tiles, one loads Q, K and V, one a bias, one writes O
//   consumers  the other warpgroups own 64 query rows each; S, P and O live in their registers
//
// Three things keep the tensor cores busy while a warpgroup computes its softmax:
//   within a warpgroup  S(n - 1) = Q K(n - 1)^T and O += P(n) V(n) are issued together, and the
//                       softmax of S(n - 1) runs beside the second product
//   between warpgroups  they take turns: one issues its products while another computes
//   between tiles       the first S of the next tile is issued before O of this one is written
//
// Sources: FlashAttention-3, arXiv:2407.08608; PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions" and "Tensor copy".
#include "../common/wg_gemm.cuh"
#include "bias_box_sm90.cuh"
#include "dropout.cuh"
#include "fwd_block_sm90.cuh"
#include "mask.cuh"
#include "softmax.cuh"

// The output of a split: rows of a warp from `row` on, in float32.
template <int N>
__device__ __forceinline__ void store_partial_rows(const FlashFwdSm90Params& params,
                                                   const FwdTile& tile, int row,
                                                   const float (&acc)[N][4]) {
  const int lane = threadIdx.x % 32;
  float* out =
      params.partial_out +
      (tile.split * params.partial_rows + tile.lse_row(params.base) + row + lane / 4) * (N * 8) +
      lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + lane / 4 + half * 8 >= tile.m_rows) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      *reinterpret_cast<float2*>(out + half * 8 * N * 8 + n * 8) =
          make_float2(acc[n][2 * half], acc[n][2 * half + 1]);
    }
  }
}

// Stores the maximum and the sum of two rows of a split, see RowState::partial.
__device__ __forceinline__ void store_partial_sums(const FlashFwdSm90Params& params,
                                                   const FwdTile& tile, int row,
                                                   const float2 (&sums)[2]) {
  const int lane = threadIdx.x % 32;
  if (lane % 4 != 0) return;
  float2* out = params.partial_sums + tile.split * params.partial_rows + tile.lse_row(params.base);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + lane / 4 + half * 8;
    if (own < tile.m_rows) out[own] = sums[half];
  }
}

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int Q_STAGES, int KV_STAGES,
          bool SOFTCAP, bool ALIBI, int BIAS, bool DROPOUT, bool SPLIT, int SMEM_BYTES>
__global__ void __launch_bounds__((BLOCK_M / 64 + 1) * WARPGROUP, 1)
    flash_fwd_sm90(const __grid_constant__ FlashFwdSm90Params params) {
  using Layout = FwdLayout<HEAD_DIM, BLOCK_M, BLOCK_N, Q_STAGES, KV_STAGES, BIAS>;
  using TileQ = typename Layout::TileQ;
  using TileKV = typename Layout::TileKV;
  static_assert(Layout::BYTES == SMEM_BYTES, "host and device disagree on shared memory");
  constexpr int GROUPS = Layout::GROUPS;
  static_assert(GROUPS == 2 || GROUPS == 3, "the register split is made for two or three");

  const AttentionShape& shape = params.base.shape;
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_q = smem_address(smem);
  const uint32_t smem_k = smem_q + Layout::K_OFFSET;
  const uint32_t smem_v = smem_q + Layout::V_OFFSET;
  __shared__ FwdShared<Layout> shared;
  if (threadIdx.x == 0) shared.init();
  __syncthreads();

  if (warpgroup_index() == 0) {
    release_registers<GROUPS == 2 ? 40 : 32>();
    const int warp = warp_in_warpgroup();
    if (!elect_one()) return;
    if constexpr (Layout::HAS_BIAS) {
      if (warp == 3) return load_fwd_bias(params, shared, smem_q);
    }
    if (warp == 0) schedule_fwd_tiles(params, shared);
    if (warp == 1) load_fwd_tiles(params, shared, smem_q);
    if (warp == 2) write_fwd_tiles<SPLIT>(params, shared, smem_q);
    return;
  }

  // ---- consumers ----
  claim_registers<GROUPS == 2 ? 232 : 160>();
  const int group = warpgroup_index() - 1;
  const int lane = threadIdx.x % 32;
  const int warp_row = group * 64 + threadIdx.x / 32 % 4 * 16;
  const ScoreScale<SOFTCAP> score(shape);
  const uint64_t dropout_seed = DROPOUT ? *params.base.dropout_seed : 0;
  Ring<Q_STAGES> q_ring;
  Ring<KV_STAGES> kv_ring;  // of K; V follows one tile behind, in the same stages
  Ring<1> bias_ring;
  const FwdTile* tile = shared.tiles + FWD_TILE_RECORDS - 1;
  int n, n_begin, inner_begin, inner_end;

  RowState state;
  float acc_o[HEAD_DIM / 8][4];
  uint32_t p[BLOCK_N / 16][4];

  const auto take_turn = [&] { named_barrier_sync(1 + group, 2 * WARPGROUP); };
  const auto pass_turn = [&] { named_barrier_arrive(1 + (group + 1) % GROUPS, 2 * WARPGROUP); };
  const auto issue_qk = [&](float (&s)[BLOCK_N / 8][4]) {
    shared.k.wait_full(kv_ring);
    wg_gemm<T, HEAD_DIM / 16>(
        s, WgRowOperand<TileQ>(smem_q + uniform(q_ring.stage) * TileQ::BYTES, group * 64),
        WgRowOperand<TileKV>(smem_k + uniform(kv_ring.stage) * TileKV::BYTES, 0), false);
  };
  const auto issue_pv = [&](const Ring<KV_STAGES>& ring) {
    shared.v.wait_full(ring);
    wg_gemm<T, BLOCK_N / 16>(
        acc_o, p, WgColumnOperand<TileKV>(smem_v + uniform(ring.stage) * TileKV::BYTES, 0), true);
  };
  const auto softmax = [&](float (&s)[BLOCK_N / 8][4], bool masked, float (&rescale)[2]) {
    const int row = tile->m_begin + warp_row + lane / 4;
    const int col = n * BLOCK_N + lane % 4 * 2;
    if constexpr (SOFTCAP) apply_softcap(s, score.to_tanh);
    if constexpr (ALIBI) {
      const float slope =
          params.base.alibi_slopes[tile->batch * params.base.alibi_batch_stride + tile->head];
      apply_alibi(s, score.alibi(slope), row, col, tile->sequence.diagonal);
    }
    uint32_t bias_loads = 0;
    if constexpr (BIAS == BIAS_BOXES) {
      shared.bias[group].wait_full(bias_ring);
      bias_loads = add_bias_tile<typename Layout::TileBias, T>(
          s, Layout::bias_address(smem_q, group), warp_row % 64, score.alibi(1.f));
    } else if constexpr (BIAS != 0) {
      using Element = const BiasElement<T, BIAS>;
      BiasHead<Element>(static_cast<Element*>(params.base.bias), params.base.bias_strides,
                        tile->sequence, tile->batch, tile->head)
          .add_to(s, row, col, score.alibi(1.f));
    }
    if (masked) apply_mask(s, tile->sequence, row, col);
    state.update<SOFTCAP>(s, score.scale_log2, rescale, [&] {
      if constexpr (BIAS == BIAS_BOXES) {  // now that nobody waits for these loads any more
        wait_for_loads(bias_loads);
        __syncwarp();
        shared.bias[group].release(0);
        bias_ring.advance();
      }
    });
    if constexpr (DROPOUT) {  // the sum is of all weights
      Dropout(dropout_seed, shape, tile->batch, tile->head).apply<Dropped::ZERO>(s, row, col);
    }
  };
  // O / sum goes to where Q was, for the writer; LSE straight to memory.
  const auto hand_over_o = [&](int stage) {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem_address(&shared.o_full[stage][group]));
  };
  const auto write_lse = [&](const FwdTile& tile, const float (&lse)[2]) {
    float* out = params.base.lse;
    if (!out || lane % 4 != 0) return;
    out += tile.lse_row(params.base);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + lane / 4 + half * 8;
      if (row < tile.m_rows) out[row] = lse[half];
    }
  };
  const auto sink_of = [&](const FwdTile& tile) {
    return params.base.sinks ? params.base.sinks[tile.head] : -INF;
  };
  const auto write_tile = [&](const FwdTile& tile, int stage) {
    float lse[2];
    float2 sums[2];  // of a split; the kernel that combines them adds the sink
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float inverse;
      if constexpr (SPLIT) {
        sums[half] = state.partial(half, score.scale_log2);
        inverse = sums[half].y == 0.f ? 0.f : rcp_approx(sums[half].y);
      } else {
        inverse = state.finish(half, score.scale_log2, lse[half], sink_of(tile) * LOG2E);
      }
      if constexpr (DROPOUT) inverse *= shape.dropout_scale;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 8; ++d) {
        acc_o[d][2 * half] *= inverse;
        acc_o[d][2 * half + 1] *= inverse;
      }
    }
    if constexpr (SPLIT) {
      store_partial_rows(params, tile, warp_row, acc_o);
    } else {
      wg_store_tile<TileQ, T>(smem_q + stage * TileQ::BYTES, warp_row, acc_o);
    }
    hand_over_o(stage);
    // Last: the fence of the hand-over would wait for these stores.
    if constexpr (SPLIT) {
      store_partial_sums(params, tile, warp_row, sums);
    } else {
      write_lse(tile, lse);
    }
  };
  // A tile without keys; not through acc_o, which may be in use by a product.
  const auto write_empty = [&](const FwdTile& tile, int stage) {
    if constexpr (!SPLIT) {
      const float zeros[4] = {};
      for (int chunk = lane; chunk < 16 * TileQ::COLS / 8; chunk += 32) {
        st_shared_128(
            smem_q + stage * TileQ::BYTES + TileQ::offset(warp_row + chunk % 16, chunk / 16),
            zeros);
      }
    }
    hand_over_o(stage);
    if constexpr (SPLIT) {
      store_partial_sums(params, tile, warp_row, {{-INF, 0.f}, {-INF, 0.f}});
    } else {
      const float sink = sink_of(tile);
      write_lse(tile, {sink, sink});
    }
  };
  const auto next_record = [&] {
    return tile == shared.tiles + FWD_TILE_RECORDS - 1 ? shared.tiles : tile + 1;
  };
  // Waits for the next tile that has keys; writes those that have none. False at the end.
  const auto next_tile = [&] {
    for (;;) {
      shared.q[group].wait_full(q_ring);
      tile = next_record();
      if (uniform(tile->m_rows) == 0) return false;
      if (uniform(tile->has_keys())) break;
      write_empty(*tile, q_ring.stage);
      q_ring.advance();
    }
    n = uniform(tile->n_range.end - 1);
    n_begin = uniform(tile->n_range.begin);
    inner_begin = uniform(tile->n_range.inner_begin);
    inner_end = uniform(tile->n_range.inner_end);
    return true;
  };
  // One key tile: n is the one whose scores are computed, n + 1 the one whose values are added.
  const auto step = [&](bool masked) {
    const Ring<KV_STAGES> v_ring = kv_ring;
    kv_ring.advance();
    float s[BLOCK_N / 8][4];
    take_turn();
    issue_qk(s);
    issue_pv(v_ring);
    pass_turn();
    wgmma_wait<1>();
    pin(s);
    shared.k.release(kv_ring.stage);
    float rescale[2];
    softmax(s, masked, rescale);
    wgmma_wait<0>();
    pin(acc_o);
    shared.v.release(v_ring.stage);
    wg_pack<T>(p, s);
    if (__any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 8; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc_o[d][i] *= rescale[i / 2];
      }
    }
  };

  // With a second buffer of Q: whether the next tile has its Q already, and keys.
  const auto next_is_ready = [&] {
    if constexpr (Q_STAGES == 1) return false;
    shared.q[group].wait_full(q_ring);
    const FwdTile& next = *next_record();
    return uniform(next.m_rows) != 0 && uniform(next.has_keys()) != 0;
  };
  // The first scores of a tile.
  const auto begin_tile = [&](float (&s)[BLOCK_N / 8][4]) {
    pin(s);
    shared.k.release(kv_ring.stage);
    set_zero(acc_o);
    state = RowState();
    float rescale[2];
    softmax(s, n >= inner_end || n < inner_begin, rescale);
    wg_pack<T>(p, s);
  };

  if (group == 0) named_barrier_arrive(1, 2 * WARPGROUP);  // the first turn
  if (!next_tile()) return;
  {  // with no product beside them
    float s[BLOCK_N / 8][4];
    take_turn();
    issue_qk(s);
    pass_turn();
    wgmma_wait<0>();
    begin_tile(s);
  }
#pragma unroll 1
  for (;;) {
    // ---- the rest of the tile: masked on both edges of a window, plain between them ----
#pragma unroll 1
    for (--n; n >= n_begin;) {
#pragma unroll 1
      for (; n >= n_begin && (n >= inner_end || n < inner_begin); --n) step(true);
#pragma unroll 1
      for (; n >= max(n_begin, inner_begin); --n) step(false);
    }

    // ---- from this tile to the next: its first scores beside the last product of this one ----
    const FwdTile& done = *tile;
    const int done_stage = q_ring.stage;
    const Ring<KV_STAGES> v_ring = kv_ring;
    kv_ring.advance();
    q_ring.advance();
    const auto finish = [&] {
      pass_turn();
      wgmma_wait<0>();
      pin(acc_o);
      shared.v.release(v_ring.stage);
      write_tile(done, done_stage);
    };
    float s[BLOCK_N / 8][4];
    take_turn();
    if (next_is_ready()) {
      next_tile();
      issue_qk(s);
      issue_pv(v_ring);
      finish();
    } else {
      issue_pv(v_ring);
      finish();
      if (!next_tile()) return;
      take_turn();
      issue_qk(s);
      pass_turn();
      wgmma_wait<0>();
    }
    begin_tile(s);
  }
}
