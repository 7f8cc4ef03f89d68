// The backward pass of flash_bwd_sm90.cu for wide heads, where dK and dV of 64 keys do not fit the
// registers of one warpgroup. The formulas, the arrays and the kernels before and after it are the
// same. The products are divided among the consumer warpgroups along the head dimension instead:
//
//   S, dP      a warpgroup computes all BLOCK_M queries of the tile with its share of the keys, and
//              writes its share of P and dS to shared memory
//   dV^T, dK^T a warpgroup owns 64 or 128 of the HEAD_DIM rows, for all BLOCK_N keys of the block:
//              dV^T += dO^T P, dK^T += Q^T dS
//   dQ         a warpgroup computes the same columns of dQ = dS K in two parts. Each part goes
//              through shared memory, and the copy engine adds it to dq_accum. Head dim 256 leaves
//              no room for that with tiles of 64 keys, so the warpgroup adds it from registers,
//              which costs up to 30 %
//
// A narrow v has HEAD_DIM_V = 128 columns where q and k have 192: five slices of 64 rows of dV^T
// and dK^T for two warpgroups. Each owns a slice of dV^T and one of dK^T. Both compute the last
// slice of dK^T, each with half of the queries, and add up their sums when they write it.
//
// The product for dV runs while dS is computed, the one for dK while dQ is added.
//
// Template parameters are those of flash_bwd_sm90.cu, HEAD_DIM_V, which is the head dimension of v,
// dout and dv, and GROUPS, the number of consumer warpgroups.
//
// Warps. The warps of warpgroup 0 are the producers, and the others the consumers:
//   warp 0     one lane chooses the next tile
//   warp 1     one lane loads K and Q with lse_log2 and delta
//   warp 2     one lane loads V and dO
//   warp 3     the reducer of staged dQ; or with a semaphore one lane that keeps the turns (Turns)
//
// Shared memory holds one buffer of K and of V, two of Q and of dO, one of P and of dS, and for dQ:
//   tiles of 80 keys    one buffer for a part of warpgroup 1; warpgroup 0 stages its own in the
//                       place of P; dO has one buffer only
//   three warpgroups    a buffer for a part of each
//   a narrow v          a buffer for each part of both
//
// Why nothing is overwritten too early. Q, K, V and dO have a barrier for "full" and one for
// "empty" (common/ring.cuh). P and dS have one buffer each, and the barrier of one protects the
// other:
//   - dS is written after P_WRITTEN, which every warpgroup reaches after its products with the last
//     dS.
//   - P is written after DS_WRITTEN of the step before, which every warpgroup reaches after its
//     product for dV.
//   - dQ in the place of P is written after the same DS_WRITTEN, and the next P after p_free, at
//     which the reducer arrives when the copy engine has read the second part of dQ.
//   - Each part of dQ is written after DQ_EMPTY, at which the reducer arrives when the copy engine
//     has read the part before.
//
// flash_bwd_sm90.cu explains why it ends. The lane that keeps the turns sees the same heads and
// query tiles as the consumers.
#include "../partial_gradient.cuh"
#include "../store_rows.cuh"
#include "bwd_wide_consumer.cuh"

// Stores a fragment of a warp whose 16 rows are columns of `out` (dK^T, dV^T). It transposes the
// fragment in 8x8 matrices and writes 32 bytes a key. `out` points to the first of the columns in
// the row of the first key.
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

// Stores such a fragment in float32. Eight lanes hold neighbouring columns of a key and write a
// sector of 32 bytes.
template <int N>
__device__ __forceinline__ void store_float_columns(float* out, int row_stride,
                                                    const float (&acc)[N][4], int rows) {
  const int lane = fresh_thread_index() % 32;
  row_stride = opaque(row_stride);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = n * 8 + lane % 4 * 2 + i % 2;
      if (row < rows) out[int64_t(row) * row_stride + lane / 4 + i / 2 * 8] = acc[n][i];
    }
  }
}

template <typename T, int HEAD_DIM, int HEAD_DIM_V, int BLOCK_M, int BLOCK_N, int NUM_STAGES,
          int GROUPS, bool SOFTCAP, bool ALIBI, int BIAS, bool DROPOUT, int SMEM_BYTES,
          bool WALKS_UP>
__global__ void __launch_bounds__((GROUPS + 1) * WARPGROUP, 1)
    flash_bwd_wide_sm90(const __grid_constant__ FlashBwdSm90Params params) {
  using Options = ScoreOptions<T, SOFTCAP, ALIBI, static_cast<BiasKind>(BIAS), DROPOUT>;
  using Layout =
      BwdWideLayout<HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, NUM_STAGES, GROUPS, WALKS_UP>;
  using Consumer = BwdWideConsumer<Options, Layout>;
  constexpr int CONSUMERS = Layout::CONSUMERS;
  constexpr int SLICES = Layout::SLICES;
  constexpr int DK_SLICES = Layout::DK_SLICES;
  constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : Layout::STAGES_DQ ? 24 : 40;
  constexpr int CONSUMER_REGISTERS = GROUPS == 3 ? 160 : Layout::STAGES_DQ ? 240 : 232;
  static_assert(Layout::BYTES == SMEM_BYTES, "host and device disagree on shared memory");
  static_assert(NUM_STAGES == 2, "its number is the parity of a turn");
  static_assert(GROUPS == 2 || GROUPS == 3, "the register split is made for two or three");

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_k = smem_address(smem);
  __shared__ typename Layout::Shared shared;
  __shared__ Turns turns;
  __shared__ uint64_t p_free;
  if (threadIdx.x == 0) {
    // The scheduler waits for both producers, and for the reducer, or the lane that keeps the
    // turns.
    const int followers = Layout::STAGES_DQ || params.base.dq_semaphore ? 3 : 2;
    mbarrier_init(smem_address(&p_free), 1);
    turns.init(CONSUMERS);
    shared.init(CONSUMERS, followers);
  }
  __syncthreads();  // the barriers are initialised

  if (warpgroup_index() == 0) {
    dealloc_registers<PRODUCER_REGISTERS>();
    const int warp = warp_in_warpgroup();
    if (warp == 3) {
      if constexpr (Layout::STAGES_DQ) {
        return reduce_staged_dq<Layout>(params.base, shared, p_free, smem_k);
      }
      if (params.base.dq_semaphore && elect_one()) {
        keep_turns<BLOCK_M, BLOCK_N>(params.base, shared, turns);
      }
      return;
    }
    if (!elect_one()) return;
    if (warp == 0) {
      schedule_bwd_tiles<BLOCK_M>(params, shared, BLOCK_N);
    } else if (warp == 1) {
      load_bwd_tiles<typename Layout::TileQ, typename Layout::TileK, NUM_STAGES>(
          params, shared,
          {RowsMap::K, RowsMap::Q, smem_k, smem_k + Layout::Q_OFFSET, shared.k, shared.q,
           RowConstants::LOAD});
    } else if (warp == 2) {
      load_bwd_tiles<typename Layout::TileDout, typename Layout::TileV, Layout::DOUT_STAGES>(
          params, shared,
          {RowsMap::V, RowsMap::DOUT, smem_k + Layout::V_OFFSET, smem_k + Layout::DOUT_OFFSET,
           shared.v, shared.dout, RowConstants::SKIP});
    }
    return;
  }

  // ---- consumers ----
  alloc_registers<CONSUMER_REGISTERS>();
  const AttentionShape& shape = params.base.shape;
  const int group = warpgroup_index() - 1;
  Ring<BWD_TILE_RECORDS> record;
  typename Consumer::Scores slope;
  Consumer consumer = {params, shared, turns, p_free, smem_k, group};
  // Transposed: rows are head_dim, columns are keys.
  typename Consumer::GradientK acc_dk;
  typename Consumer::GradientV acc_dv;
  const auto pin_dk = [&] {
#pragma unroll
    for (int i = 0; i < DK_SLICES; ++i) pin(acc_dk[i]);
  };

  typename Consumer::Place at = {};
#pragma unroll 1
  for (;; record.advance()) {
    const auto& tile = shared.wait_tile(record);
    if (uniform(tile.n_rows) == 0) return;
#pragma unroll
    for (int i = 0; i < DK_SLICES; ++i) set_zero(acc_dk[i]);
#pragma unroll
    for (int i = 0; i < SLICES; ++i) set_zero(acc_dv[i]);
    shared.k.wait_full(kv_place(record));
    shared.v.wait_full(kv_place(record));
    const int head_end = tile.has_queries() ? tile.head_end : tile.head_begin;
#pragma unroll 1
    for (at.head = uniform(tile.head_begin); at.head < uniform(head_end); ++at.head) {
      at.m = uniform(tile.first_m());
      typename Consumer::Scores s, dp;
      consumer.issue_s(s, at);
      consumer.issue_dp(dp, at);
      wgmma_wait<1>();
      pin(s);
      consumer.make_p(s, slope, tile, at);
      consumer.make_ds(s, dp, slope, acc_dv, tile, at);
#pragma unroll 1
      for (;;) {
        auto next = at;
        next.advance();
        // Read from the record each time: ptxas 12.9 crashes if a count of tiles lives here.
        if (at.m == uniform(tile.m_last)) break;
        next.m = uniform(tile.m_after(at.m));
        // S and dP of the next query tile run beside dQ and dK of this one.
        typename Consumer::Scores s, dp;
        typename Consumer::DqPart dq;
        typename Consumer::SecondDqPart second;
        auto& dq_second = Consumer::second_part(dq, second);
        consumer.issue_dq(dq, FIRST);
        consumer.issue_dk(acc_dk, 0, at);
        wgmma_wait<1>();
        consumer.add_dq(dq, FIRST, tile, at);
        consumer.issue_dq(dq_second, SECOND);
        if constexpr (DK_SLICES == 2) consumer.issue_dk(acc_dk, 1, at);
        consumer.issue_s(s, next);
        wgmma_wait<DK_SLICES>();
        consumer.add_dq(dq_second, SECOND, tile, at);
        consumer.issue_dp(dp, next);
        wgmma_wait<1>();
        pin(s);
        pin_dk();
        shared.q.release_by_thread(at.ring.stage);
        consumer.make_p(s, slope, tile, next);
        consumer.make_ds(s, dp, slope, acc_dv, tile, next);
        at = next;
      }
      typename Consumer::DqPart dq;
      typename Consumer::SecondDqPart second;
      auto& dq_second = Consumer::second_part(dq, second);
      consumer.issue_dq(dq, FIRST);
      consumer.issue_dk(acc_dk, 0, at);
      wgmma_wait<1>();
      consumer.add_dq(dq, FIRST, tile, at);
      consumer.issue_dq(dq_second, SECOND);
      if constexpr (DK_SLICES == 2) consumer.issue_dk(acc_dk, 1, at);
      wgmma_wait<DK_SLICES - 1>();
      consumer.add_dq(dq_second, SECOND, tile, at);
      wgmma_wait<0>();
      pin_dk();
      shared.q.release_by_thread(at.ring.stage);
      at.advance();
    }
    shared.k.release(0);  // the next tile is loaded while this one is written
    shared.v.release(0);

    // ---- write dK and dV ----
    const int64_t row = tile.sequence.start_k + tile.n_begin;
    const Strides& dk_strides = params.base.dk_strides;
    const Strides& dv_strides = params.base.dv_strides;
    T* dk = static_cast<T*>(params.base.dk) + dk_strides.at(tile.batch, row, tile.head_kv);
    T* dv = static_cast<T*>(params.base.dv) + dv_strides.at(tile.batch, row, tile.head_kv);
    const int columns_v = HEAD_DIM_V == HEAD_DIM ? shape.head_dim : HEAD_DIM_V;
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
      if (shape.group_shares > 1) {
        const auto partial = [&](KeyGradient which) {
          return partial_gradient<HEAD_DIM>(params.base, which, tile.share, tile.batch, row,
                                            tile.head_kv) +
                 column;
        };
        store_float_columns(partial(KeyGradient::DK), shape.heads_kv * HEAD_DIM, acc_dk[i],
                            tile.n_rows);
        store_float_columns(partial(KeyGradient::DV), shape.heads_kv * HEAD_DIM, acc_dv[i],
                            tile.n_rows);
        continue;
      }
      store_columns(dk + column, dk_strides.row, acc_dk[i], tile.n_rows, shape.head_dim - column);
      store_columns(dv + column, dv_strides.row, acc_dv[i], tile.n_rows, columns_v - column);
    }
    if constexpr (Layout::SHARED_SLICE) {
      typename Consumer::HalfSlice sum;
      consumer.exchange_shared_slice(sum, acc_dk[SLICES]);
#pragma unroll
      for (int n = 0; n < BLOCK_N / 16; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[n][j] *= shape.scale;
      }
      const int column = GROUPS * SLICES * 64 + fresh_thread_index() % WARPGROUP / 32 * 16;
      const int key = group * (BLOCK_N / 2);
      if (shape.group_shares > 1) {
        float* partial = partial_gradient<HEAD_DIM>(params.base, KeyGradient::DK, tile.share,
                                                    tile.batch, row + key, tile.head_kv);
        store_float_columns(partial + column, shape.heads_kv * HEAD_DIM, sum, tile.n_rows - key);
        continue;
      }
      store_columns(dk + key * dk_strides.row + column, dk_strides.row, sum, tile.n_rows - key,
                    shape.head_dim - column);
    }
  }
}
