// Attention forward on wgmma and TMA (Hopper): a persistent block takes query tiles of BLOCK_M rows
// one after the other, and walks over the key tiles of each from the last to the first.
//
//   producer   one warp of warpgroup 0: one lane loads Q, K and V tiles into rings in shared memory
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
#include "../common/params.cuh"
#include "../ptx/warpgroup.cuh"
#include "block_info.cuh"
#include "mask.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "tensor_rows.cuh"
#include "tile_order.cuh"
#include "wg_gemm.cuh"

// A query tile, located by the producer for everybody. m_rows = 0 ends the work of the block.
struct FwdTile {
  Sequence sequence;
  TileRange n_range;
  int m_begin;
  int m_rows;
  int head;
  int batch;

  __device__ bool has_keys() const { return n_range.begin < n_range.end; }

  __device__ void locate(const FlashFwdParams& params, uint32_t index, int block_m, int block_n) {
    const AttentionShape& shape = params.shape;
    const Tile tile = tile_of_block(index, ceil_div(shape.seqlen_q, block_m), shape.heads_q,
                                    shape.batch, shape.heads_per_section);
    sequence = load_sequence(shape, tile.batch, params.cu_seqlens_q, params.cu_seqlens_k);
    m_begin = tile.block * block_m;
    m_rows = max(0, min(block_m, sequence.seqlen_q - m_begin));
    n_range = key_tiles(sequence, m_begin, m_begin + m_rows, block_n);
    head = tile.head;
    batch = tile.batch;
  }
};

// The next tile is chosen when so many key tiles of this one are still to be loaded: late, so that
// the work is shared out evenly, but in time.
constexpr int LOOK_AHEAD = 3;

// The scheduler is a tile ahead of the loader, which is at most Q_STAGES ahead of the writer of O.
constexpr int TILE_RECORDS = 4;

template <int GROUPS, int Q_STAGES, int KV_STAGES>
struct FwdShared {
  RingBarriers<Q_STAGES> q[GROUPS];  // emptied by the writer: O takes the place of Q
  RingBarriers<KV_STAGES> k;
  RingBarriers<KV_STAGES> v;
  uint64_t located[TILE_RECORDS];
  uint64_t almost_loaded;
  uint64_t o_full[Q_STAGES][GROUPS];
  FwdTile tiles[TILE_RECORDS];
};

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int Q_STAGES, int KV_STAGES,
          bool SOFTCAP, bool ALIBI, int SMEM_BYTES>
__global__ void __launch_bounds__((BLOCK_M / 64 + 1) * WARPGROUP, 1)
    flash_fwd_sm90(const __grid_constant__ FlashFwdSm90Params params) {
  using TileQ = SmemTile<BLOCK_M, round_up(HEAD_DIM, 64)>;
  using TileKV = SmemTile<BLOCK_N, round_up(HEAD_DIM, 64)>;
  static_assert(Q_STAGES * TileQ::BYTES + 2 * KV_STAGES * TileKV::BYTES == SMEM_BYTES,
                "host and device disagree on shared memory");
  constexpr int GROUPS = BLOCK_M / 64;
  static_assert(GROUPS == 2 || GROUPS == 3, "the register split is made for two or three");

  const AttentionShape& shape = params.base.shape;
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_q = smem_address(smem);
  const uint32_t smem_k = smem_q + Q_STAGES * TileQ::BYTES;
  const uint32_t smem_v = smem_k + KV_STAGES * TileKV::BYTES;
  __shared__ FwdShared<GROUPS, Q_STAGES, KV_STAGES> shared;
  if (threadIdx.x == 0) {
    for (auto& q : shared.q) q.init(1);
    shared.k.init(GROUPS * 4);  // warps
    shared.v.init(GROUPS * 4);
    mbarrier_init(smem_address(&shared.almost_loaded), 1);
    for (auto& barrier : shared.located) mbarrier_init(smem_address(&barrier), 1);
    for (auto& stage : shared.o_full) {
      for (auto& barrier : stage) mbarrier_init(smem_address(&barrier), WARPGROUP / 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  // 64 rows and 64 columns of Q or O.
  const auto q_address = [&](int stage, int group, int block) {
    return smem_q + stage * TileQ::BYTES + block * TileQ::BLOCK_BYTES +
           group * 64 * TileQ::ROW_BYTES;
  };
  if (warpgroup_index() == 0) {
    release_registers<GROUPS == 2 ? 40 : 32>();
    const int warp = warp_in_warpgroup();
    if (!elect_one()) return;

    if (warp == 0) {
      // ---- scheduler: chooses the tiles ----
      const uint32_t num_tiles =
          ceil_div(shape.seqlen_q, BLOCK_M) * uint32_t(shape.heads_q) * shape.batch;
      Ring<TILE_RECORDS> record;
      Ring<1> loaded;
      uint32_t index = blockIdx.x;
#pragma unroll 1
      for (;;) {
        FwdTile& tile = shared.tiles[record.stage];
        tile.m_rows = 0;
        if (index < num_tiles) {
          tile.locate(params.base, index, BLOCK_M, BLOCK_N);
          if (tile.m_rows == 0) {  // packed: past the end of this sequence
            index = next_tile_index(params.tile_counter, index, num_tiles);
            continue;
          }
        }
        mbarrier_arrive(smem_address(&shared.located[record.stage]));
        if (index >= num_tiles) return;
        mbarrier_wait(smem_address(&shared.almost_loaded), loaded.parity);
        index = next_tile_index(params.tile_counter, index, num_tiles);
        loaded.advance();
        record.advance();
      }
    } else if (warp == 1) {
      // ---- loader: K first, for it may come before Q's place is free; V a tile behind K ----
      Ring<TILE_RECORDS> record;
      Ring<Q_STAGES> q_ring;
      Ring<KV_STAGES> k_ring, v_ring;
#pragma unroll 1
      for (;; record.advance(), q_ring.advance()) {
        mbarrier_wait(smem_address(&shared.located[record.stage]), record.parity);
        const FwdTile& tile = shared.tiles[record.stage];
        const uint32_t almost_loaded = smem_address(&shared.almost_loaded);
        if (tile.m_rows == 0 ||
            !tile.has_keys()) {  // the consumers want to know of it all the same
#pragma unroll 1
          for (int group = 0; group < GROUPS; ++group) {
            shared.q[group].wait_empty(q_ring);
            mbarrier_arrive(smem_address(&shared.q[group].full[q_ring.stage]));
          }
          if (tile.m_rows == 0) return;
          mbarrier_arrive(almost_loaded);
          continue;
        }
        const auto rows_of = [&](const TensorMap& map, int which, int64_t start) {
          return TensorRows(map, params.sequence_maps, which, shape, tile.batch, start);
        };
        const TensorRows q = rows_of(params.q_map, 0, tile.sequence.start_q);
        const TensorRows k = rows_of(params.k_map, 1, tile.sequence.start_k);
        const TensorRows v = rows_of(params.v_map, 2, tile.sequence.start_k);
        const int head_kv = tile.head / (shape.heads_q / shape.heads_kv);
        const auto load = [&](const TensorRows& rows, uint32_t tiles,
                              RingBarriers<KV_STAGES>& barriers, Ring<KV_STAGES>& ring, int n) {
          barriers.wait_empty(ring);
          const uint32_t full = smem_address(&barriers.full[ring.stage]);
          mbarrier_arrive_expect(full, TileKV::BYTES);
#pragma unroll
          for (int block = 0; block < TileKV::NUM_BLOCKS; ++block) {
            rows.load(tiles + ring.stage * TileKV::BYTES + block * TileKV::BLOCK_BYTES, full, block,
                      n * BLOCK_N, head_kv);
          }
          ring.advance();
        };
        const int n_begin = tile.n_range.begin;
        int n = tile.n_range.end - 1;
        const int n_almost = min(n, n_begin + LOOK_AHEAD);
        load(k, smem_k, shared.k, k_ring, n);
#pragma unroll 1
        for (int group = 0; group < GROUPS; ++group) {
          shared.q[group].wait_empty(q_ring);
          const uint32_t full = smem_address(&shared.q[group].full[q_ring.stage]);
          mbarrier_arrive_expect(full, TileQ::BYTES / GROUPS);
#pragma unroll
          for (int block = 0; block < TileQ::NUM_BLOCKS; ++block) {
            q.load(q_address(q_ring.stage, group, block), full, block, tile.m_begin + group * 64,
                   tile.head);
          }
        }
#pragma unroll 1
        for (; n > n_begin; --n) {
          if (n == n_almost) mbarrier_arrive(almost_loaded);
          load(k, smem_k, shared.k, k_ring, n - 1);
          load(v, smem_v, shared.v, v_ring, n);
        }
        if (n == n_almost) mbarrier_arrive(almost_loaded);
        load(v, smem_v, shared.v, v_ring, n);
      }
    } else if (warp == 2) {
      // ---- writer of O, from where Q was ----
      Ring<TILE_RECORDS> record;
      Ring<Q_STAGES> q_ring;
#pragma unroll 1
      for (;; record.advance(), q_ring.advance()) {
        mbarrier_wait(smem_address(&shared.located[record.stage]), record.parity);
        const FwdTile& tile = shared.tiles[record.stage];
        if (tile.m_rows == 0) break;
        const TensorRows out(params.out_map, params.sequence_maps, 3, shape, tile.batch,
                             tile.sequence.start_q);
#pragma unroll 1
        for (int group = 0; group < GROUPS; ++group) {
          mbarrier_wait(smem_address(&shared.o_full[q_ring.stage][group]), q_ring.parity);
#pragma unroll
          for (int block = 0; block < TileQ::NUM_BLOCKS; ++block) {
            out.store(q_address(q_ring.stage, group, block), block, tile.m_begin + group * 64,
                      tile.head);
          }
          bulk_commit();
          bulk_wait_read<0>();
          mbarrier_arrive(smem_address(&shared.q[group].empty[q_ring.stage]));
        }
      }
      bulk_wait<0>();
    }
    return;
  }

  // ---- consumers ----
  claim_registers<GROUPS == 2 ? 232 : 160>();
  const int group = warpgroup_index() - 1;
  const int lane = threadIdx.x % 32;
  const int warp_row = group * 64 + threadIdx.x / 32 % 4 * 16;
  const ScoreScale<SOFTCAP> score(shape);
  Ring<Q_STAGES> q_ring;
  Ring<KV_STAGES> kv_ring;  // of K; V follows one tile behind, in the same stages
  const FwdTile* tile = shared.tiles + TILE_RECORDS - 1;
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
    if (masked) apply_mask(s, tile->sequence, row, col);
    state.update(s, score.scale_log2, rescale);
  };
  // O / sum goes to where Q was, for the writer; LSE straight to memory.
  const auto hand_over_o = [&](int stage) {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem_address(&shared.o_full[stage][group]));
  };
  const auto write_lse = [&](const FwdTile& tile, const float (&lse)[2]) {
    if (!params.base.lse || lane % 4 != 0) return;
    float* out = params.base.lse + tile.batch * params.base.lse_batch_stride +
                 tile.head * params.base.lse_head_stride + tile.sequence.start_q + tile.m_begin;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + lane / 4 + half * 8;
      if (row < tile.m_rows) out[row] = lse[half];
    }
  };
  const auto write_tile = [&](const FwdTile& tile, int stage) {
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = state.finish(half, score.scale_log2, lse[half]);
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 8; ++d) {
        acc_o[d][2 * half] *= inverse;
        acc_o[d][2 * half + 1] *= inverse;
      }
    }
    wg_store_tile<TileQ, T>(smem_q + stage * TileQ::BYTES, warp_row, acc_o);
    hand_over_o(stage);
    write_lse(tile, lse);  // last: the fence of the hand-over would wait for these stores
  };
  // A tile without keys; not through acc_o, which may be in use by a product.
  const auto write_empty = [&](const FwdTile& tile, int stage) {
    const float zeros[4] = {};
    for (int chunk = lane; chunk < 16 * TileQ::COLS / 8; chunk += 32) {
      st_shared_128(
          smem_q + stage * TileQ::BYTES + TileQ::offset(warp_row + chunk % 16, chunk / 16), zeros);
    }
    hand_over_o(stage);
    write_lse(tile, {-INF, -INF});
  };
  // Waits for the next tile that has keys; writes those that have none. False at the end.
  const auto next_tile = [&] {
    for (;;) {
      shared.q[group].wait_full(q_ring);
      tile = tile == shared.tiles + TILE_RECORDS - 1 ? shared.tiles : tile + 1;
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

  if (group == 0) named_barrier_arrive(1, 2 * WARPGROUP);  // the first turn
  if (!next_tile()) return;
  {
    float s[BLOCK_N / 8][4];
    take_turn();
    issue_qk(s);
    pass_turn();
    wgmma_wait<0>();
    pin(s);
    shared.k.release(kv_ring.stage);
    float rescale[2];
    softmax(s, n >= inner_end || n < inner_begin, rescale);
    wg_pack<T>(p, s);
  }
  set_zero(acc_o);
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

    // ---- from this tile to the next ----
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
    if constexpr (Q_STAGES > 1) {  // the next Q is there already
      if (!next_tile()) {
        issue_pv(v_ring);
        finish();
        return;
      }
      issue_qk(s);
      issue_pv(v_ring);
      finish();
    } else {  // it comes when O has left the only buffer
      issue_pv(v_ring);
      finish();
      if (!next_tile()) return;
      take_turn();
      issue_qk(s);
      pass_turn();
      wgmma_wait<0>();
    }
    pin(s);
    shared.k.release(kv_ring.stage);
    set_zero(acc_o);
    state = RowState();
    float rescale[2];
    softmax(s, n >= inner_end || n < inner_begin, rescale);
    wg_pack<T>(p, s);
  }
}
