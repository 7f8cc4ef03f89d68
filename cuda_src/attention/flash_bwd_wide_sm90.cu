// The backward of flash_bwd_sm90.cu for wide heads, where dK and dV of 64 keys do not fit the
// registers of one warpgroup: the products are split along the head dimension instead.
//
//   S, dP      each warpgroup has all queries of the tile and a share of the keys; P and dS go
//              through shared memory
//   dV^T, dK^T each warpgroup owns 64 or 128 of the head_dim rows, of all keys of the block:
//              dV^T += dO^T P, dK^T += Q^T dS
//   dQ         the same columns, dQ = dS K; added to the accumulator straight from registers:
//              shared memory has no room for it, and its bandwidth is what this kernel lacks most
//
// dV runs while dS is computed, dK while dQ is added.
#include "../common/wg_gemm.cuh"
#include "../ptx/atomics.cuh"
#include "../ptx/stmatrix.cuh"
#include "bias.cuh"
#include "bwd_block_sm90.cuh"
#include "dropout.cuh"
#include "mask.cuh"
#include "store_rows.cuh"

enum NamedBarrier { P_WRITTEN = 1, DS_WRITTEN };

// With a semaphore the blocks take turns, query tile by query tile in the order of the keys, so
// that the sum is repeatable bit by bit.
struct Turns {
  uint64_t come;  // consumers may add to this tile
  uint64_t over;  // they have

  __device__ void init(int consumers) {
    mbarrier_init(smem_address(&come), 1);
    mbarrier_init(smem_address(&over), consumers / 32);
  }
};

// The keepers of the turns, two lanes, so that no consumer waits for memory: lane 0 waits for the
// blocks before this one, lane 1 lets those after it go on.
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
    // A lane that is here no longer reads the last tile.
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

// A fragment of 16 columns of `out` in rows (dK^T, dV^T of a warp): transposes it matrix by matrix
// and writes 32 bytes a key. `out` is the first of the columns in the first key's row.
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

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int NUM_STAGES, int GROUPS,
          bool SOFTCAP, bool ALIBI, int BIAS, bool DROPOUT, int SMEM_BYTES>
__global__ void __launch_bounds__((GROUPS + 1) * WARPGROUP, 1)
    flash_bwd_wide_sm90(const __grid_constant__ FlashBwdSm90Params params) {
  using TileKV = SmemTile<BLOCK_N, HEAD_DIM>;
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using TileS = SmemTile<BLOCK_M, round_up(BLOCK_N, 64)>;
  constexpr int CONSUMERS = GROUPS * WARPGROUP;
  constexpr bool BIAS_GRAD = BIAS == 1 || BIAS == 3;
  constexpr int KEYS = BLOCK_N / GROUPS;          // of S and dP in a warpgroup
  constexpr int SLICES = HEAD_DIM / 64 / GROUPS;  // of 64 head_dim rows in a warpgroup
  constexpr int DQ_COLS = SLICES * 32;
  static_assert(2 * TileKV::BYTES + NUM_STAGES * 2 * TileQ::BYTES + 2 * TileS::BYTES == SMEM_BYTES,
                "host and device disagree on shared memory");
  static_assert(NUM_STAGES == 2, "its number is the parity of a turn");
  static_assert(BLOCK_M == 64, "one warpgroup has all queries of S");
  static_assert(KEYS * GROUPS == BLOCK_N && KEYS % 16 == 0 && SLICES * GROUPS * 64 == HEAD_DIM,
                "equal shares");
  static_assert(GROUPS == 2 || GROUPS == 3, "the register split is made for two or three");

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_k = smem_address(smem);
  const uint32_t smem_v = smem_k + TileKV::BYTES;
  const uint32_t smem_q = smem_v + TileKV::BYTES;
  const uint32_t smem_dout = smem_q + NUM_STAGES * TileQ::BYTES;
  const uint32_t smem_p = smem_dout + NUM_STAGES * TileQ::BYTES;
  const uint32_t smem_ds = smem_p + TileS::BYTES;
  __shared__ BwdShared<BLOCK_M, NUM_STAGES> shared;
  __shared__ Turns turns;
  if (threadIdx.x == 0) {
    shared.init(CONSUMERS, params.base.dq_semaphore ? 4 : 2);
    turns.init(CONSUMERS);
  }
  __syncthreads();

  if (warpgroup_index() == 0) {
    release_registers<GROUPS == 2 ? 40 : 32>();
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
      load_bwd_tiles<TileQ, TileKV, NUM_STAGES>(params, shared,
                                                {1, 0, smem_k, smem_q, shared.k, shared.q, true});
    } else if (warp == 2) {
      load_bwd_tiles<TileQ, TileKV, NUM_STAGES>(
          params, shared, {2, 3, smem_v, smem_dout, shared.v, shared.dout, false});
    }
    return;
  }

  // ---- consumers ----
  claim_registers<GROUPS == 2 ? 232 : 160>();
  const AttentionShape& shape = params.base.shape;
  // Positions of elements come from threadIdx, not from `group`: it stays in a uniform register,
  // and with it the descriptors.
  const int group = warpgroup_index() - 1;

  float acc_dk[SLICES][BLOCK_N / 8][4];  // transposed: rows are head_dim, columns are keys
  float acc_dv[SLICES][BLOCK_N / 8][4];
  Ring<BWD_TILE_RECORDS> record;

  const auto store_s = [&](uint32_t tile, const float (&acc)[KEYS / 8][4]) {
    const int thread = fresh_thread_index();
    const int lane = thread % 32;
    const int warp_row = thread % WARPGROUP / 32 * 16;
    const int warp_key = (thread / WARPGROUP - 1) * KEYS;
    uint32_t packed[KEYS / 16][4];
    wg_pack<T>(packed, acc);
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
      stmatrix_x4(tile + TileS::offset(warp_row + lane % 16, warp_key / 8 + k * 2 + lane / 16),
                  packed[k]);
    }
  };

  // Of the query tile that `head` and `m` name, in the buffers of `ring`.
  struct Place {
    int head;
    int m;
    Ring<NUM_STAGES> ring;
  };
  using Scores = float[KEYS / 8][4];

  // uniform() keeps descriptors in uniform registers: see flash_bwd_sm90.cu.
  const auto issue_s = [&](Scores& s, const Place& at) {
    shared.q.wait_full(at.ring);
    wg_gemm<T, HEAD_DIM / 16>(
        s, WgRowOperand<TileQ>(smem_q + uniform(at.ring.stage) * TileQ::BYTES, 0),
        WgRowOperand<TileKV>(uniform(smem_k), group * KEYS), false);
  };
  const auto issue_dp = [&](Scores& dp, const Place& at) {
    shared.dout.wait_full(at.ring);
    wg_gemm<T, HEAD_DIM / 16>(
        dp, WgRowOperand<TileQ>(smem_dout + uniform(at.ring.stage) * TileQ::BYTES, 0),
        WgRowOperand<TileKV>(uniform(smem_v), group * KEYS), false);
  };
  float cap_slope[SOFTCAP ? KEYS / 8 : 1][4];  // d tanh(x) / dx

  // s = P, from S.
  const auto make_p = [&](Scores& s, const BwdTile& tile, const Place& at) {
    const ScoreScale<SOFTCAP> score(shape);
    const int thread = fresh_thread_index();
    const int row = thread % WARPGROUP / 32 * 16 + thread % 32 / 4;
    const int query = at.m * BLOCK_M + row;
    const int key = tile.n_begin + (thread / WARPGROUP - 1) * KEYS + thread % 4 * 2;
    if constexpr (SOFTCAP) {
      apply_softcap(s, score.to_tanh);
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) cap_slope[n][i] = 1.f - s[n][i] * s[n][i];
      }
    }
    if constexpr (ALIBI) {
      const float slope =
          params.base.alibi_slopes[tile.batch * params.base.alibi_batch_stride + at.head];
      apply_alibi(s, score.alibi(slope), query, key, tile.sequence.diagonal);
    }
    if constexpr (BIAS != 0) {
      using Element = const BiasElement<T, BIAS>;
      BiasHead<Element>(static_cast<Element*>(params.base.bias), params.base.bias_strides,
                        tile.sequence, tile.batch, at.head)
          .add_to(s, query, key, score.alibi(1.f));
    }
    if (uniform(tile.m_range.needs_mask(at.m))) apply_mask(s, tile.sequence, query, key);
    const float* lse_log2 = &shared.lse_log2[at.ring.stage][row];
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = exp2_approx(s[n][i] * score.scale_log2 - lse_log2[i / 2 * 8]);
      }
    }
    if constexpr (DROPOUT) {
      Dropout(*params.base.dropout_seed, shape, tile.batch, at.head)
          .apply<Dropped::NEGATIVE>(s, query, key);
    }
  };
  // Publishes P, adds to dV, and publishes dS. One product may be in flight before: dP.
  const auto make_ds = [&](Scores& s, Scores& dp, const BwdTile& tile, const Place& at) {
    if constexpr (DROPOUT) {
      Scores kept;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) kept[n][i] = kept_weight(s[n][i]);
      }
      store_s(smem_p, kept);
    } else {
      store_s(smem_p, s);
    }
    fence_async_proxy();
    named_barrier_sync(P_WRITTEN, CONSUMERS);  // so nobody reads the last dS any more
    const uint32_t dout_stage = smem_dout + uniform(at.ring.stage) * TileQ::BYTES;
#pragma unroll
    for (int i = 0; i < SLICES; ++i) {
      wg_gemm<T, BLOCK_M / 16>(acc_dv[i], WgColumnOperand<TileQ>(dout_stage, group * SLICES + i),
                               WgColumnOperand<TileS>(smem_p, 0), true);
    }
    wgmma_wait<SLICES>();
    pin(dp);
    const int row = fresh_thread_index() % WARPGROUP / 32 * 16 + fresh_thread_index() % 32 / 4;
    const float* delta = &shared.delta[at.ring.stage][row];
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (DROPOUT) {
          const bool dropped = s[n][i] < 0.f;
          dp[n][i] = dropped ? 0.f : dp[n][i] * shape.dropout_scale;
          s[n][i] = fabsf(s[n][i]);
        }
        dp[n][i] = s[n][i] * (dp[n][i] - delta[i / 2 * 8]);
      }
    }
    if constexpr (BIAS_GRAD) {
      if (params.base.dbias) {
        const int thread = fresh_thread_index();
        const int query = at.m * BLOCK_M + thread % WARPGROUP / 32 * 16 + thread % 32 / 4;
        const int key = tile.n_begin + (thread / WARPGROUP - 1) * KEYS + thread % 4 * 2;
        BiasHead<float>(params.base.dbias, params.base.dbias_strides, tile.sequence, tile.batch,
                        at.head)
            .red_add_from(dp, query, key);
      }
    }
    if constexpr (SOFTCAP) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dp[n][i] *= cap_slope[n][i];
      }
    }
    store_s(smem_ds, dp);
    fence_async_proxy();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < SLICES; ++i) pin(acc_dv[i]);
    shared.dout.release(at.ring.stage);
    named_barrier_sync(DS_WRITTEN, CONSUMERS);  // so nobody reads the last P any more
  };
  // dQ in two halves: for all of it beside the next S there are not enough registers.
  using HalfDq = float[DQ_COLS / 8][4];
  const auto issue_dq = [&](HalfDq& dq, int half) {
    const int column = (group * 2 + half) * DQ_COLS;
    wg_gemm<T, BLOCK_N / 16>(
        dq, WgRowOperand<TileS>(smem_ds, 0),
        WgColumnOperand<TileKV>(uniform(smem_k) + column % 64 * sizeof(T), column / 64), false);
  };
  const auto issue_dk = [&](const Place& at, int slice) {
    wg_gemm<T, BLOCK_M / 16>(acc_dk[slice],
                             WgColumnOperand<TileQ>(smem_q + uniform(at.ring.stage) * TileQ::BYTES,
                                                    group * SLICES + slice),
                             WgColumnOperand<TileS>(smem_ds, 0), true);
  };
  const auto add_dq = [&](HalfDq& dq, int half, const BwdTile& tile, const Place& at) {
    pin(dq);
    const int64_t accum = accum_row(params.base, tile, at.head, at.m * BLOCK_M);
    // The ring has two places, so its stage is the parity of the turn.
    if (half == 0 && params.base.dq_semaphore) {
      mbarrier_wait(smem_address(&turns.come), at.ring.stage);
    }
    float* dq_accum = params.base.dq_accum + accum * HEAD_DIM +
                      dq_fragment_offset((group * 2 + half) * DQ_COLS / 8);
#pragma unroll
    for (int n = 0; n < DQ_COLS / 8; ++n) red_add(dq_accum + n * WARPGROUP * 4, dq[n]);
    if (half == 1 && params.base.dq_semaphore) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&turns.over));
    }
  };
  const auto pin_dk = [&] {
#pragma unroll
    for (int i = 0; i < SLICES; ++i) pin(acc_dk[i]);
  };

  Place at = {};
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
      Scores s, dp;
      issue_s(s, at);
      issue_dp(dp, at);
      wgmma_wait<1>();
      pin(s);
      make_p(s, tile, at);
      make_ds(s, dp, tile, at);
#pragma unroll 1
      for (;;) {
        Place next = at;
        next.ring.advance();
        if (--next.m < uniform(tile.m_range.begin)) break;
        // From this query tile to the next: S and dP of that one beside dQ and dK of this one.
        Scores s, dp;
        HalfDq dq0, dq1;
        issue_dq(dq0, 0);
        issue_dk(at, 0);
        wgmma_wait<1>();
        add_dq(dq0, 0, tile, at);
        issue_dq(dq1, 1);
        if constexpr (SLICES == 2) issue_dk(at, 1);
        issue_s(s, next);
        wgmma_wait<SLICES>();
        add_dq(dq1, 1, tile, at);
        issue_dp(dp, next);
        wgmma_wait<1>();
        pin(s);
        pin_dk();
        shared.q.release_by_thread(at.ring.stage);
        make_p(s, tile, next);
        make_ds(s, dp, tile, next);
        at = next;
      }
      HalfDq dq0, dq1;
      issue_dq(dq0, 0);
      issue_dk(at, 0);
      wgmma_wait<1>();
      add_dq(dq0, 0, tile, at);
      issue_dq(dq1, 1);
      if constexpr (SLICES == 2) issue_dk(at, 1);
      wgmma_wait<SLICES - 1>();
      add_dq(dq1, 1, tile, at);
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
