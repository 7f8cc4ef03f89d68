// FlashAttention-2 backward on wgmma and TMA (Hopper), head dims up to 128: one block owns BLOCK_N
// keys of one key head and walks over the query tiles that see them, of every query head of the
// group. The formulas are in flash_bwd_sm80.cu.
//
//   producers  two warps: one lane each loads K, then Q tiles, or V, then dO tiles, into rings;
//              the second one also a bias that comes in boxes, 64 keys for each consumer
//   reducer    one warp: one lane has the copy engine add dQ tiles to the accumulator
//   consumers  a warpgroup owns 64 keys. It computes S and dP transposed (rows are keys), so that
//              P^T and dS^T are already operands of dV += P^T dO and dK += dS^T Q, in registers;
//              only dS goes through shared memory, for dQ = dS K
//
// dV runs while dS is exchanged between the warpgroups, dK while dQ is handed to the reducer.
// Sources: FlashAttention-3, arXiv:2407.08608; PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions".
#include "../common/wg_gemm.cuh"
#include "../ptx/atomics.cuh"
#include "../ptx/stmatrix.cuh"
#include "bias_box_sm90.cuh"
#include "bwd_block_sm90.cuh"
#include "dropout.cuh"
#include "mask_transposed.cuh"
#include "store_rows.cuh"

enum NamedBarrier { DS_WRITTEN = 1, DQ_EMPTY, DQ_FULL };

// The reducer, a warp: adds each query tile's dQ to the accumulator. With a semaphore the blocks
// take turns in the order of their keys, so that the sum is repeatable bit by bit.
template <int HEAD_DIM, int BLOCK_M, int BLOCK_N, int THREADS, int STAGES>
__device__ __forceinline__ void reduce_dq(const FlashBwdParams& params,
                                          BwdShared<BLOCK_M, STAGES>& shared, uint32_t smem_dq) {
  const bool elected = elect_one();
  int* flag = nullptr;  // of the turn that is not over yet
  // Late, when the addition has long reached memory.
  const auto end_turn = [&] {
    if (!flag) return;
    bulk_wait<0>();
    release_flag(flag);
    flag = nullptr;
  };
  named_barrier_arrive(DQ_EMPTY, THREADS);
  Ring<BWD_TILE_RECORDS> record;
#pragma unroll 1
  for (;; record.advance()) {
    const BwdTile& tile = shared.wait_tile(record);
    if (tile.n_rows == 0) return;
    if (elected) mbarrier_arrive(smem_address(&shared.almost_loaded));  // no longer reads the last
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
      for (int m = tile.m_range.end - 1; m >= tile.m_range.begin; --m) {
        const int64_t row = accum_row(params, tile, head, m * BLOCK_M);
        named_barrier_sync(DQ_FULL, THREADS);
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
        named_barrier_arrive(DQ_EMPTY, THREADS);
      }
    }
    if (elected) end_turn();
  }
}

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int NUM_STAGES, bool SOFTCAP,
          bool ALIBI, int BIAS, bool DROPOUT, int SMEM_BYTES>
__global__ void __launch_bounds__((BLOCK_N / 64 + 1) * WARPGROUP, 1)
    flash_bwd_sm90(const __grid_constant__ FlashBwdSm90Params params) {
  using TileKV = SmemTile<BLOCK_N, round_up(HEAD_DIM, 64)>;
  using TileQ = SmemTile<BLOCK_M, round_up(HEAD_DIM, 64)>;
  using TileS = SmemTile<BLOCK_M, BLOCK_N>;
  using TileBias = SmemTile<BLOCK_M, 64>;
  constexpr int GROUPS = BLOCK_N / 64;
  constexpr int CONSUMERS = GROUPS * WARPGROUP;
  constexpr bool BIAS_GRAD = BIAS != 0 && BIAS != 2;
  constexpr int BIAS_BYTES = BIAS == BIAS_BOXES ? GROUPS * TileBias::BYTES : 0;
  // The part of dQ that a warpgroup computes: 64 rows, or 64 or 32 columns.
  constexpr bool SPLIT_ROWS = BLOCK_M == 64 * GROUPS;
  constexpr int DQ_COLS = HEAD_DIM > 64 || SPLIT_ROWS ? 64 : 64 / GROUPS;
  constexpr int DQ_BYTES = GROUPS * 64 * DQ_COLS * sizeof(float);
  static_assert(SPLIT_ROWS ? HEAD_DIM == 64 : BLOCK_M == 64 && HEAD_DIM <= GROUPS * 64,
                "dQ has one part a warpgroup");
  static_assert(
      2 * TileKV::BYTES + NUM_STAGES * (2 * TileQ::BYTES + TileS::BYTES) + DQ_BYTES + BIAS_BYTES ==
          SMEM_BYTES,
      "host and device disagree on shared memory");
  static_assert(GROUPS == 2, "the register split is made for two consumers");
  static_assert(NUM_STAGES == 2, "one barrier an iteration protects dS only if it has two stages");
  static_assert(ACCUM_ROW_ALIGN % BLOCK_M == 0, "a query tile must not straddle two sequences");

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_k = smem_address(smem);
  const uint32_t smem_v = smem_k + TileKV::BYTES;
  const uint32_t smem_q = smem_v + TileKV::BYTES;
  const uint32_t smem_dout = smem_q + NUM_STAGES * TileQ::BYTES;
  const uint32_t smem_ds = smem_dout + NUM_STAGES * TileQ::BYTES;
  const uint32_t smem_dq = smem_ds + NUM_STAGES * TileS::BYTES;
  const uint32_t smem_bias = smem_dq + DQ_BYTES;
  __shared__ BwdShared<BLOCK_M, NUM_STAGES> shared;
  __shared__ RingBarriers<1> bias_barriers[GROUPS];
  if (threadIdx.x == 0) {
    if constexpr (BIAS == BIAS_BOXES) {
      for (auto& ring : bias_barriers) ring.init(4);  // warps
    }
    shared.init(CONSUMERS, 3);
  }
  __syncthreads();

  if (warpgroup_index() == 0) {
    release_registers<40>();
    const int warp = warp_in_warpgroup();
    if (warp == 0) {
      if (elect_one()) schedule_bwd_tiles(params, shared, BLOCK_N);
    } else if (warp == 1) {
      if (elect_one())
        load_bwd_tiles<TileQ, TileKV, NUM_STAGES>(params, shared,
                                                  {1, 0, smem_k, smem_q, shared.k, shared.q, true});
    } else if (warp == 2) {
      Ring<1> bias_ring;
      const auto load_bias = [&](const BwdTile& tile, int head, int m) {
        if constexpr (BIAS == BIAS_BOXES) {
          const BiasMap bias(params, tile.batch, head);
#pragma unroll 1
          for (int group = 0; group < GROUPS; ++group) {
            bias.load<TileBias>(smem_bias + group * TileBias::BYTES, bias_barriers[group],
                                bias_ring, m * BLOCK_M, tile.n_begin + group * 64);
          }
          bias_ring.advance();
        }
      };
      if (elect_one())
        load_bwd_tiles<TileQ, TileKV, NUM_STAGES>(
            params, shared, {2, 3, smem_v, smem_dout, shared.v, shared.dout, false}, load_bias);
    } else {
      reduce_dq<HEAD_DIM, BLOCK_M, BLOCK_N, CONSUMERS + 32>(params.base, shared, smem_dq);
    }
    return;
  }

  // ---- consumers ----
  claim_registers<232>();
  const AttentionShape& shape = params.base.shape;
  // Positions of elements come from threadIdx, not from `group`: it stays in a uniform register,
  // and with it the descriptors.
  const int group = warpgroup_index() - 1;
  const int key_row = (threadIdx.x - WARPGROUP) / 32 * 16;  // first of the warp's 16
  const int lane = threadIdx.x % 32;
  const ScoreScale<SOFTCAP> score(shape);
  const uint64_t dropout_seed = DROPOUT ? *params.base.dropout_seed : 0;

  float acc_dk[HEAD_DIM / 8][4];
  float acc_dv[HEAD_DIM / 8][4];
  Ring<NUM_STAGES> ring;
  Ring<1> bias_ring;
  Ring<BWD_TILE_RECORDS> record;

  const auto step = [&](const BwdTile& tile, int head, int m_begin, bool masked) {
    // uniform() keeps descriptors in uniform registers, and those of K and V from being computed
    // ahead of all loops, which would fill the register file.
    const uint32_t k_tile = uniform(smem_k);
    const uint32_t v_tile = uniform(smem_v);
    const int stage = uniform(ring.stage);
    const uint32_t q_stage = smem_q + stage * TileQ::BYTES;
    const uint32_t dout_stage = smem_dout + stage * TileQ::BYTES;
    const uint32_t ds_stage = smem_ds + stage * TileS::BYTES;

    const float alibi_slope =
        ALIBI ? params.base.alibi_slopes[tile.batch * params.base.alibi_batch_stride + head] : 0.f;

    // ---- S^T = K Q^T, dP^T = V dO^T ----
    float s[BLOCK_M / 8][4];
    float dp[BLOCK_M / 8][4];
    shared.q.wait_full(ring);
    wg_gemm<T, HEAD_DIM / 16>(s, WgRowOperand<TileKV>(k_tile, group * 64),
                              WgRowOperand<TileQ>(q_stage, 0), false);
    shared.dout.wait_full(ring);
    wg_gemm<T, HEAD_DIM / 16>(dp, WgRowOperand<TileKV>(v_tile, group * 64),
                              WgRowOperand<TileQ>(dout_stage, 0), false);
    wgmma_wait<1>();
    pin(s);

    // ---- P ----
    const int column = lane % 4 * 2;
    const int key = tile.n_begin + key_row + lane / 4;
    const int query = m_begin + column;
    float cap_slope[SOFTCAP ? BLOCK_M / 8 : 1][4];  // d tanh(x) / dx
    if constexpr (SOFTCAP) {
      apply_softcap(s, score.to_tanh);
#pragma unroll
      for (int n = 0; n < BLOCK_M / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) cap_slope[n][i] = 1.f - s[n][i] * s[n][i];
      }
    }
    if constexpr (ALIBI)
      apply_alibi(s, score.alibi(alibi_slope), key, query, -tile.sequence.diagonal);
    if constexpr (BIAS == BIAS_BOXES) {
      bias_barriers[group].wait_full(bias_ring);
      add_bias_tile_transposed<TileBias, T>(s, smem_bias + group * TileBias::BYTES, key_row % 64,
                                            score.alibi(1.f));
    } else if constexpr (BIAS != 0) {
      using Element = const BiasElement<T, BIAS>;
      BiasHead<Element>(static_cast<Element*>(params.base.bias), params.base.bias_strides,
                        tile.sequence, tile.batch, head)
          .transposed()
          .add_to(s, key, query, score.alibi(1.f));
    }
    if (masked) apply_mask_transposed(s, tile.sequence, key, query);
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
      const float2 lse_log2 =
          *reinterpret_cast<const float2*>(&shared.lse_log2[ring.stage][n * 8 + column]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = exp2_approx(s[n][i] * score.scale_log2 - (i % 2 ? lse_log2.y : lse_log2.x));
      }
    }
    uint32_t p[BLOCK_M / 16][4];
    if constexpr (DROPOUT) {
      Dropout(dropout_seed, shape, tile.batch, head)
          .apply_transposed<Dropped::NEGATIVE>(s, key, query);
      float kept[BLOCK_M / 8][4];
#pragma unroll
      for (int n = 0; n < BLOCK_M / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) kept[n][i] = kept_weight(s[n][i]);
      }
      wg_pack<T>(p, kept);
    } else {
      wg_pack<T>(p, s);
    }
    if constexpr (SOFTCAP && !BIAS_GRAD) {  // early, for registers
#pragma unroll
      for (int n = 0; n < BLOCK_M / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= cap_slope[n][i];
      }
    }

    // ---- dS ----
    wgmma_wait<0>();
    pin(dp);
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
      const float2 delta =
          *reinterpret_cast<const float2*>(&shared.delta[ring.stage][n * 8 + column]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (DROPOUT) {
          const bool dropped = s[n][i] < 0.f;
          dp[n][i] = dropped ? 0.f : dp[n][i] * shape.dropout_scale;
          s[n][i] = fabsf(s[n][i]);
        }
        dp[n][i] = s[n][i] * (dp[n][i] - (i % 2 ? delta.y : delta.x));
      }
    }
    if constexpr (BIAS_GRAD) {
      if (params.base.dbias) {
        BiasHead<float>(params.base.dbias, params.base.dbias_strides, tile.sequence, tile.batch,
                        head)
            .transposed()
            .red_add_from(dp, key, query);
      }
      if constexpr (SOFTCAP) {
#pragma unroll
        for (int n = 0; n < BLOCK_M / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) dp[n][i] *= cap_slope[n][i];
        }
      }
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
    wg_gemm<T, BLOCK_M / 16>(acc_dv, p, WgColumnOperand<TileQ>(dout_stage, 0), true);
    fence_async_proxy();
    named_barrier_sync(DS_WRITTEN, CONSUMERS);
    if constexpr (BIAS == BIAS_BOXES) {
      // Not before dS is written, which was computed from the bias: an arrival can overtake loads
      // that are still under way (wait_for_loads).
      bias_barriers[group].release(0);
      bias_ring.advance();
    }
    float dq[DQ_COLS / 8][4];
    const int dq_col = SPLIT_ROWS ? 0 : group * DQ_COLS;
    wg_gemm<T, BLOCK_N / 16>(dq, WgRowOperand<TileS>(ds_stage, SPLIT_ROWS ? group * 64 : 0),
                             WgColumnOperand<TileKV>(k_tile + dq_col % 64 * sizeof(T), dq_col / 64),
                             false);
    wgmma_wait<1>();
    pin(acc_dv);
    pin(p);
    shared.dout.release(ring.stage);
    wg_gemm<T, BLOCK_M / 16>(acc_dk, ds, WgColumnOperand<TileQ>(q_stage, 0), true);
    wgmma_wait<1>();
    pin(dq);
    named_barrier_sync(DQ_EMPTY, CONSUMERS + 32);
#pragma unroll
    for (int n = 0; n < DQ_COLS / 8; ++n) {
      st_shared_128(smem_dq + dq_fragment_offset(group * DQ_COLS / 8 + n) * sizeof(float), dq[n]);
    }
    fence_async_proxy();
    named_barrier_arrive(DQ_FULL, CONSUMERS + 32);
    wgmma_wait<0>();
    pin(acc_dk);
    pin(ds);
    shared.q.release_by_thread(ring.stage);
    ring.advance();
  };

#pragma unroll 1
  for (;; record.advance()) {
    const BwdTile& tile = shared.wait_tile(record);
    if (uniform(tile.n_rows) == 0) return;
    set_zero(acc_dk);
    set_zero(acc_dv);
    shared.k.wait_full(kv_place(record));
    shared.v.wait_full(kv_place(record));
    // Masked on both edges of a window, plain between them.
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
          step(tile, head, m * BLOCK_M, true);
        }
#pragma unroll 1
        for (; m >= inner_begin; --m) step(tile, head, m * BLOCK_M, false);
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
    const int64_t row = tile.sequence.start_k + tile.n_begin + key_row;
    const Strides& dk_strides = params.base.dk_strides;
    const Strides& dv_strides = params.base.dv_strides;
    store_rows(static_cast<T*>(params.base.dk) + dk_strides.at(tile.batch, row, tile.head_kv),
               dk_strides.row, acc_dk, tile.n_rows - key_row, shape.head_dim);
    store_rows(static_cast<T*>(params.base.dv) + dv_strides.at(tile.batch, row, tile.head_kv),
               dv_strides.row, acc_dv, tile.n_rows - key_row, shape.head_dim);
  }
}
