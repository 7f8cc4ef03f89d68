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
#include "../ptx/atomics.cuh"
#include "../ptx/stmatrix.cuh"
#include "bwd_block_sm90.cuh"
#include "mask.cuh"
#include "store_rows.cuh"
#include "wg_gemm.cuh"

enum NamedBarrier { P_WRITTEN = 1, DS_WRITTEN, TURN_COME, TURN_OVER };

// With a semaphore, a warp that keeps the turns of the blocks, so that no consumer waits for
// memory: each query tile's dQ is added to in the order of the keys, and the sum is repeatable bit
// by bit.
template <int BLOCK_M, int BLOCK_N, int THREADS, int STAGES>
__device__ __forceinline__ void keep_turns(const FlashBwdParams& params,
                                           BwdShared<BLOCK_M, STAGES>& shared) {
  const bool elected = elect_one();
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
        int* flag = turn_flag(params, accum_row(params, tile, head, m * BLOCK_M), BLOCK_M);
        if (elected) wait_flag(flag, turn_of_tile(tile, m * BLOCK_M, BLOCK_M, BLOCK_N));
        __syncwarp();
        named_barrier_arrive(TURN_COME, THREADS);
        named_barrier_sync(TURN_OVER, THREADS);
        if (elected) release_flag(flag);
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
          bool SOFTCAP, bool ALIBI, int SMEM_BYTES>
__global__ void __launch_bounds__((GROUPS + 1) * WARPGROUP, 1)
    flash_bwd_wide_sm90(const __grid_constant__ FlashBwdSm90Params params) {
  using TileKV = SmemTile<BLOCK_N, HEAD_DIM>;
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using TileS = SmemTile<BLOCK_M, round_up(BLOCK_N, 64)>;
  constexpr int CONSUMERS = GROUPS * WARPGROUP;
  constexpr int KEYS = BLOCK_N / GROUPS;          // of S and dP in a warpgroup
  constexpr int SLICES = HEAD_DIM / 64 / GROUPS;  // of 64 head_dim rows in a warpgroup
  static_assert(2 * TileKV::BYTES + NUM_STAGES * (2 * TileQ::BYTES + TileS::BYTES) + TileS::BYTES ==
                    SMEM_BYTES,
                "host and device disagree on shared memory");
  static_assert(NUM_STAGES == 2, "the last P may still be read when the next is written");
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
  const uint32_t smem_ds = smem_p + NUM_STAGES * TileS::BYTES;
  __shared__ BwdShared<BLOCK_M, NUM_STAGES> shared;
  if (threadIdx.x == 0) shared.init(CONSUMERS, params.base.dq_semaphore ? 3 : 2);
  __syncthreads();

  if (warpgroup_index() == 0) {
    release_registers<GROUPS == 2 ? 40 : 32>();
    const int warp = warp_in_warpgroup();
    if (warp == 3) {
      if (params.base.dq_semaphore) {
        keep_turns<BLOCK_M, BLOCK_N, CONSUMERS + 32>(params.base, shared);
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
  Ring<NUM_STAGES> ring;
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

  const auto step = [&](const BwdTile& tile, int head, int m, bool masked) {
    const int m_begin = m * BLOCK_M;
    // See flash_bwd_sm90.cu.
    const uint32_t k_tile = uniform(smem_k);
    const uint32_t v_tile = uniform(smem_v);
    const int stage = uniform(ring.stage);
    const uint32_t q_stage = smem_q + stage * TileQ::BYTES;
    const uint32_t dout_stage = smem_dout + stage * TileQ::BYTES;
    const uint32_t p_stage = smem_p + stage * TileS::BYTES;

    const float alibi_slope =
        ALIBI ? params.base.alibi_slopes[tile.batch * params.base.alibi_batch_stride + head] : 0.f;

    // ---- S = Q K^T, dP = dO V^T ----
    float s[KEYS / 8][4];
    float dp[KEYS / 8][4];
    shared.q.wait_full(ring);
    wg_gemm<T, HEAD_DIM / 16>(s, WgRowOperand<TileQ>(q_stage, 0),
                              WgRowOperand<TileKV>(k_tile, group * KEYS), false);
    shared.dout.wait_full(ring);
    wg_gemm<T, HEAD_DIM / 16>(dp, WgRowOperand<TileQ>(dout_stage, 0),
                              WgRowOperand<TileKV>(v_tile, group * KEYS), false);
    wgmma_wait<1>();
    pin(s);

    // ---- P, dV^T += dO^T P ----
    const ScoreScale<SOFTCAP> score(shape);
    const int thread = fresh_thread_index();
    const int row = thread % WARPGROUP / 32 * 16 + thread % 32 / 4;
    const int query = m_begin + row;
    const int key = tile.n_begin + (thread / WARPGROUP - 1) * KEYS + thread % 4 * 2;
    float cap_slope[SOFTCAP ? KEYS / 8 : 1][4];  // d tanh(x) / dx
    if constexpr (SOFTCAP) {
      apply_softcap(s, score.to_tanh);
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) cap_slope[n][i] = 1.f - s[n][i] * s[n][i];
      }
    }
    if constexpr (ALIBI)
      apply_alibi(s, score.alibi(alibi_slope), query, key, tile.sequence.diagonal);
    if (masked) apply_mask(s, tile.sequence, query, key);
    const float* lse_log2 = &shared.lse_log2[ring.stage][row];
    const float* delta = &shared.delta[ring.stage][row];
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = exp2_approx(s[n][i] * score.scale_log2 - lse_log2[i / 2 * 8]);
      }
    }
    store_s(p_stage, s);
    fence_async_proxy();
    named_barrier_sync(P_WRITTEN, CONSUMERS);  // so nobody reads the last dS any more
#pragma unroll
    for (int i = 0; i < SLICES; ++i) {
      wg_gemm<T, BLOCK_M / 16>(acc_dv[i], WgColumnOperand<TileQ>(dout_stage, group * SLICES + i),
                               WgColumnOperand<TileS>(p_stage, 0), true);
    }
    if constexpr (SOFTCAP) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= cap_slope[n][i];
      }
    }

    // ---- dS ----
    wgmma_wait<SLICES>();
    pin(dp);
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dp[n][i] = s[n][i] * (dp[n][i] - delta[i / 2 * 8]);
      }
    }
    store_s(smem_ds, dp);
    fence_async_proxy();
    named_barrier_sync(DS_WRITTEN, CONSUMERS);

    // ---- dQ = dS K, dK^T += Q^T dS ----
    float dq[SLICES * 8][4];
    wg_gemm<T, BLOCK_N / 16>(dq, WgRowOperand<TileS>(smem_ds, 0),
                             WgColumnOperand<TileKV>(k_tile, group * SLICES), false);
#pragma unroll
    for (int i = 0; i < SLICES; ++i) {
      wg_gemm<T, BLOCK_M / 16>(acc_dk[i], WgColumnOperand<TileQ>(q_stage, group * SLICES + i),
                               WgColumnOperand<TileS>(smem_ds, 0), true);
    }
    wgmma_wait<SLICES>();
#pragma unroll
    for (int i = 0; i < SLICES; ++i) pin(acc_dv[i]);
    pin(dq);
    shared.dout.release(ring.stage);

    // ---- add dQ ----
    const int64_t accum = accum_row(params.base, tile, head, m_begin);
    if (params.base.dq_semaphore) named_barrier_sync(TURN_COME, CONSUMERS + 32);
    float* dq_accum = params.base.dq_accum + accum * HEAD_DIM;
#pragma unroll
    for (int n = 0; n < SLICES * 8; ++n) {
      red_add(dq_accum + dq_fragment_offset(group * SLICES * 8 + n), dq[n]);
    }
    if (params.base.dq_semaphore) named_barrier_arrive(TURN_OVER, CONSUMERS + 32);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < SLICES; ++i) pin(acc_dk[i]);
    shared.q.release_by_thread(ring.stage);
    ring.advance();
  };

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
    const int head_end = uniform(tile.head_end);
    const int m_begin = uniform(tile.m_range.begin);
#pragma unroll 1
    for (int head = uniform(tile.head_begin); head < head_end; ++head) {
      if constexpr (GROUPS == 2) {  // masked on both edges of a window, plain between them
        const int inner_begin = max(uniform(tile.m_range.inner_begin), m_begin);
        const int inner_end = uniform(tile.m_range.inner_end);
#pragma unroll 1
        for (int m = uniform(tile.m_range.end) - 1; m >= m_begin;) {
#pragma unroll 1
          for (; m >= m_begin && (m >= inner_end || m < inner_begin); --m) {
            step(tile, head, m, true);
          }
#pragma unroll 1
          for (; m >= inner_begin; --m) step(tile, head, m, false);
        }
      } else {  // three have no registers for the bounds
#pragma unroll 1
        for (int m = uniform(tile.m_range.end) - 1; m >= m_begin; --m) {
          step(tile, head, m, uniform(tile.m_range.needs_mask(m)));
        }
      }
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
        for (int j = 0; j < 4; ++j) acc_dk[i][n][j] *= shape.scale;
      }
      const int column = (group * SLICES + i) * 64 + fresh_thread_index() % WARPGROUP / 32 * 16;
      store_columns(dk + column, dk_strides.row, acc_dk[i], tile.n_rows, shape.head_dim - column);
      store_columns(dv + column, dv_strides.row, acc_dv[i], tile.n_rows, shape.head_dim - column);
    }
  }
}
