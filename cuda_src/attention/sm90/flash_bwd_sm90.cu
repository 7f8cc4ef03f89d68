// FlashAttention-3 backward on wgmma and TMA (Hopper), for float16 and bfloat16 and head dims up to
// 128:
//
//   P  = exp2(scale_log2 * S - lse_log2)    S = score(Q K^T), recomputed
//   dS = P * (dP - delta)                   dP = dO V^T
//   dV += P^T dO    dK += dS^T Q            in registers until the end of the tile
//   dQ += dS K                              in global memory (dq_accum, float32)
//
// score_gradient.cuh has the terms of the score's options, FlashBwdParams the arrays with shapes.
// flash_bwd_preprocess.cu comes before this kernel and, but for WHOLE_HEADS,
// flash_bwd_postprocess_sm90.cu after it.
//
// A block of WHOLE_HEADS takes all key tiles of a key head (or of a share of it, with the query
// heads of that) one after the other. It alone adds to the dQ of these queries: the first key tile
// stores it in dq_accum, and the last one that a query sees writes dq. Nothing has to be cleared
// before this kernel or converted after it, the sum is deterministic, and the dQ of a single key
// tile never leaves the registers. This suits short sequences, which have many heads and whose rows
// stay in L2 (takes_heads() in sm90/backward.py).
//
// A persistent block takes tiles of BLOCK_N keys of one key head, one after the other. For each it
// walks over the tiles of BLOCK_M queries that see the keys, of every query head of the group; or
// of a share of the group, or of the rows of one of its heads, where tiles of keys are few
// (group_shares). Then dK and dV of a share go to dkv_partial in float32, and flash_bwd_combine.cu
// adds them up.
//
// Template parameters. T is the dtype of Q; HEAD_DIM is that of the tiles, and a smaller head_dim
// is filled up with zeros; NUM_STAGES is the number of buffers of Q, dO and dS; SOFTCAP, ALIBI,
// BIAS (a BiasKind) and DROPOUT are the options of the score; SMEM_BYTES is the dynamic shared
// memory of the launch; WALKS_UP is the order in which a block visits query tiles (BwdWalkingTile);
// WHOLE_HEADS is described above.
//
// Warps. The warps of warpgroup 0 are the producers and the reducer:
//   warp 0     one lane chooses the next tile and describes it in a record
//   warp 1     one lane loads K, then Q with lse_log2 and delta
//   warp 2     one lane loads V, then dO, and the bias if it comes by TMA
//   warp 3     the reducer: one lane has the copy engine add tiles of dQ to dq_accum, or fetch them
// The other warpgroups are consumers, which own 64 keys each. They compute S and dP transposed
// (rows are keys), so that P^T and dS^T are operands of dV += P^T dO and dK += dS^T Q while they
// are in registers; only dS goes through shared memory, for dQ = dS K. The product for dV runs
// while the warpgroups exchange dS, the one for dK while dQ goes to the reducer, and where the
// registers allow it (OVERLAPPED) also while the next S is computed.
//
// Shared memory holds one buffer of K and of V, two of Q, dO and dS, one of dQ in float32, and with
// a bias by TMA a tile of it for each consumer warpgroup.
//
// Why nothing is overwritten too early. Q, K, V, dO and the bias have a barrier for "full" and one
// for "empty" (common/ring.cuh). dS has two buffers: a warpgroup writes to the same one every other
// step. The barrier DS_WRITTEN of the step in between lies between two such writes, and every
// warpgroup reaches it after its last product with the older dS. A warpgroup writes its part of dQ
// after its barrier DQ_EMPTY, at which the reducer arrives when the copy engine has read the last
// one. With WHOLE_HEADS the buffers of dQ are rings of one stage instead. The consumers write to
// them, or read the sum of earlier key tiles, which is in L2 since the reducer began this tile.
//
// Why it ends. All roles see the same tiles up to the record with n_rows = 0, and in each the same
// heads and query tiles. For a deterministic sum (dq_semaphore) the blocks add to a query tile in
// the order of their keys, or in the opposite one with WALKS_UP, so blocks wait for each other. A
// block takes its tiles by ticket and waits only for tiles with earlier tickets, which belong to
// blocks that run; the earliest tile that is not done waits for none.
//
// Sources: FlashAttention-3, arXiv:2407.08608; PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions".
#include "../partial_gradient.cuh"
#include "../store_rows.cuh"
#include "bwd_consumer.cuh"
#include "bwd_turns.cuh"

// The reducer is a warp that adds the dQ of each query tile to the accumulator, part by part. With
// a semaphore the blocks add in turns, so that the sum is deterministic.
template <class L>
__device__ __forceinline__ void reduce_dq(const FlashBwdParams& params, typename L::Shared& shared,
                                          uint32_t smem_dq) {
  constexpr int BLOCK_M = L::BLOCK_M;
  // The second warpgroup's part is half empty at head dim 96.
  constexpr int LAST_PART = BLOCK_M * L::HEAD_DIM - L::DQ_PART;
  static_assert(L::GROUPS == 2 && LAST_PART <= L::DQ_PART, "dQ has two parts");
  const bool elected = elect_one();
  int* flag = nullptr;  // of the turn that this block has not ended yet
  // The buffers are empty at first.
#pragma unroll
  for (int group = 0; group < L::GROUPS; ++group) named_barrier_arrive(dq_empty(group), DQ_THREADS);
  Ring<BWD_TILE_RECORDS> record;
#pragma unroll 1
  for (;; record.advance()) {
    const auto& tile = shared.wait_tile(record);
    if (tile.n_rows == 0) return;
    // The warp has begun this tile, so it no longer reads the record of the last one.
    if (elected) mbarrier_arrive(smem_address(&shared.almost_loaded));
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
      for (int m = tile.first_m(); tile.is_m(m); m = tile.next_m(m)) {
        const int m_begin = m * BLOCK_M;
        const int64_t row = accum_row(params, tile, head, m_begin);
        if (elected && params.dq_semaphore)
          begin_turn<BLOCK_M>(flag, params, tile, row, m_begin, L::BLOCK_N);
#pragma unroll
        for (int group = 0; group < L::GROUPS; ++group) {
          named_barrier_sync(dq_full(group), DQ_THREADS);  // this part of dQ is complete
          if (!elected) continue;
          bulk_reduce_add(params.dq_accum + row * L::HEAD_DIM + group * L::DQ_PART,
                          smem_dq + group * L::DQ_PART * sizeof(float),
                          (group == 0 ? L::DQ_PART : LAST_PART) * sizeof(float));
          bulk_commit();
        }
        if (elected) bulk_wait_read<1>();
        __syncwarp();
        named_barrier_arrive(dq_empty(0), DQ_THREADS);
        if (elected) bulk_wait_read<0>();
        __syncwarp();
        named_barrier_arrive(dq_empty(1), DQ_THREADS);
      }
    }
    if (elected) end_turn(flag);
  }
}

// The reducer of a block that takes whole heads is one lane. The first key tile stores dQ of a
// query tile in dq_accum, others add to it, and for the last one the reducer fetches the sum. It
// gives the buffers to the consumers in each step, empty or with the sum, and they give them back.
// Consumers and reducer decide from the same record what a step does.
template <class L>
__device__ __forceinline__ void reduce_own_dq(const FlashBwdParams& params,
                                              typename L::Shared& shared, uint32_t smem_dq,
                                              RingBarriers<1> (&buffers)[L::GROUPS]) {
  constexpr uint32_t PART_BYTES = L::DQ_PART * sizeof(float);
  // The second warpgroup's part is half empty at head dim 96.
  constexpr uint32_t LAST_BYTES = L::BLOCK_M * L::HEAD_DIM * sizeof(float) - PART_BYTES;
  static_assert(L::GROUPS == 2 && LAST_BYTES <= PART_BYTES, "dQ has two parts");
  float* const place = params.dq_accum + own_accum_row(params.shape) * L::HEAD_DIM;
  Ring<1> ring;
  Ring<BWD_TILE_RECORDS> record;
#pragma unroll 1
  for (;; record.advance()) {
    const auto& tile = shared.wait_tile(record);
    if (tile.n_rows == 0) return;
    mbarrier_arrive(smem_address(&shared.almost_loaded));
    // This tile adds to what the last one has stored, or fetches it.
    if (!tile.begins_dq()) bulk_wait_done();
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
      for (int m = tile.first_m(); tile.is_m(m); m = tile.next_m(m)) {
        const bool completes = tile.completes_dq((m + 1) * L::BLOCK_M);
        if (completes && tile.begins_dq()) continue;  // the consumers have all of it
        const int64_t row = int64_t(head - tile.head_begin) * accum_rows_of_head(params.shape);
        float* kept = place + (row + m * L::BLOCK_M) * L::HEAD_DIM;
        bulk_wait_read<0>();
#pragma unroll
        for (int group = 0; group < L::GROUPS; ++group) {
          const uint32_t full = smem_address(&buffers[group].full[0]);
          const uint32_t bytes = group == 0 ? PART_BYTES : LAST_BYTES;
          buffers[group].wait_empty(ring);
          if (completes) {
            mbarrier_arrive_expect(full, bytes);
            bulk_load(smem_dq + group * PART_BYTES, kept + group * L::DQ_PART, bytes, full);
          } else {
            mbarrier_arrive(full);
          }
        }
        ring.advance();
        if (completes) continue;
#pragma unroll
        for (int group = 0; group < L::GROUPS; ++group) {
          float* part = kept + group * L::DQ_PART;
          const uint32_t buffer = smem_dq + group * PART_BYTES;
          const uint32_t bytes = group == 0 ? PART_BYTES : LAST_BYTES;
          buffers[group].wait_empty(ring);  // this part of dQ is complete
          if (tile.begins_dq()) {
            bulk_store(part, buffer, bytes);
          } else {
            bulk_reduce_add(part, buffer, bytes);
          }
          bulk_commit();
        }
      }
    }
  }
}

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int NUM_STAGES, bool SOFTCAP,
          bool ALIBI, int BIAS, bool DROPOUT, int SMEM_BYTES, bool WALKS_UP, bool WHOLE_HEADS>
__global__ void __launch_bounds__((BLOCK_N / 64 + 1) * WARPGROUP, 1)
    flash_bwd_sm90(const __grid_constant__ FlashBwdSm90Params params) {
  using Options = ScoreOptions<T, SOFTCAP, ALIBI, static_cast<BiasKind>(BIAS), DROPOUT>;
  using Layout = BwdLayout<Options, HEAD_DIM, BLOCK_M, BLOCK_N, NUM_STAGES, WALKS_UP, WHOLE_HEADS>;
  using TileKV = typename Layout::TileKV;
  using TileQ = typename Layout::TileQ;
  constexpr int GROUPS = Layout::GROUPS;
  constexpr int CONSUMERS = Layout::CONSUMERS;
  constexpr int FOLLOWERS = 3;  // the scheduler waits for both producers and for the reducer
  constexpr int PRODUCER_REGISTERS = Layout::CONSTANTS_AHEAD || WHOLE_HEADS ? 24 : 40;
  constexpr int CONSUMER_REGISTERS = Layout::CONSTANTS_AHEAD || WHOLE_HEADS ? 240 : 232;
  static_assert(Layout::BYTES == SMEM_BYTES, "host and device disagree on shared memory");
  static_assert(GROUPS == 2, "the register split is made for two consumers");
  static_assert(NUM_STAGES == 2, "one barrier an iteration protects dS only if it has two stages");
  static_assert(ACCUM_ROW_ALIGN % BLOCK_M == 0, "a query tile must not straddle two sequences");
  static_assert(!WHOLE_HEADS || (Options::NONE && !WALKS_UP), "such blocks take plain scores");
  static_assert(!WHOLE_HEADS || BLOCK_N % BLOCK_M == 0, "see BwdHeadTile");
  static_assert(!(SOFTCAP && stores_gradient(Options::BIAS)),
                "dS must be the gradient of the bias");

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_k = smem_address(smem);
  __shared__ typename Layout::Shared shared;
  // Each warpgroup has a tile of the bias of its own, or with WHOLE_HEADS a part of dQ.
  __shared__ RingBarriers<1> bias_barriers[GROUPS];
  __shared__ RingBarriers<1> dq_barriers[GROUPS];
  if (threadIdx.x == 0) {
    if constexpr (Layout::HAS_BIAS_TILES) {
      for (auto& ring : bias_barriers) ring.init(4);  // warps
    }
    if constexpr (WHOLE_HEADS) {
      for (auto& ring : dq_barriers) ring.init(WARPGROUP);
    }
    shared.init(CONSUMERS, FOLLOWERS);
  }
  __syncthreads();  // the barriers are initialised

  if (warpgroup_index() == 0) {
    dealloc_registers<PRODUCER_REGISTERS>();
    const int warp = warp_in_warpgroup();
    if (warp == 0) {
      if (!elect_one()) return;
      if constexpr (WHOLE_HEADS) {
        schedule_bwd_heads<BLOCK_M>(params, shared, BLOCK_N);
      } else {
        schedule_bwd_tiles<BLOCK_M>(params, shared, BLOCK_N);
      }
    } else if (warp == 1) {
      if (elect_one())
        load_bwd_tiles<TileQ, TileKV, NUM_STAGES>(
            params, shared,
            {RowsMap::K, RowsMap::Q, smem_k, smem_k + Layout::Q_OFFSET, shared.k, shared.q,
             RowConstants::LOAD});
    } else if (warp == 2) {
      Ring<1> bias_ring;
      const auto load_bias = [&](const auto& tile, int head, int m) {
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
    } else if constexpr (WHOLE_HEADS) {
      if (elect_one())
        reduce_own_dq<Layout>(params.base, shared, smem_k + Layout::DQ_OFFSET, dq_barriers);
    } else {
      reduce_dq<Layout>(params.base, shared, smem_k + Layout::DQ_OFFSET);
    }
    return;
  }

  // ---- consumers ----
  alloc_registers<CONSUMER_REGISTERS>();
  const AttentionShape& shape = params.base.shape;
  float acc_dk[HEAD_DIM / 8][4];
  float acc_dv[HEAD_DIM / 8][4];
  BwdConsumer<Options, Layout> consumer(params, shared, bias_barriers, dq_barriers, smem_k);
  Ring<BWD_TILE_RECORDS>& record = consumer.record;
#pragma unroll 1
  for (;; record.advance()) {
    const auto& tile = shared.wait_tile(record);
    if (uniform(tile.n_rows) == 0) return;
    set_zero(acc_dk);
    set_zero(acc_dv);
    shared.k.wait_full(kv_place(record));
    shared.v.wait_full(kv_place(record));
    const int head_end = uniform(tile.has_queries() ? tile.head_end : tile.head_begin);
#pragma unroll 1
    for (int head = uniform(tile.head_begin); head < head_end; ++head) {
      if constexpr (Layout::OVERLAPPED) {
        consumer.overlapped_steps(acc_dk, acc_dv, tile, head);
      } else {
        consumer.steps(acc_dk, acc_dv, tile, head);
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
    const int rows = tile.n_rows - consumer.key_row;
    if (shape.group_shares > 1) {
      const auto partial = [&](KeyGradient which) {
        return partial_gradient<HEAD_DIM>(params.base, which, tile.share, tile.batch, row,
                                          tile.head_kv);
      };
      store_float_rows(partial(KeyGradient::DK), shape.heads_kv * HEAD_DIM, acc_dk, rows);
      store_float_rows(partial(KeyGradient::DV), shape.heads_kv * HEAD_DIM, acc_dv, rows);
      continue;
    }
    const Strides& dk_strides = params.base.dk_strides;
    const Strides& dv_strides = params.base.dv_strides;
    store_rows(static_cast<T*>(params.base.dk) + dk_strides.at(tile.batch, row, tile.head_kv),
               dk_strides.row, acc_dk, rows, shape.head_dim);
    store_rows(static_cast<T*>(params.base.dv) + dv_strides.at(tile.batch, row, tile.head_kv),
               dv_strides.row, acc_dv, rows, shape.head_dim);
  }
}
