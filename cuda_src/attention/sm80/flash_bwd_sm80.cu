// FlashAttention-2 backward on mma.sync (sm_75 and newer), for float16 and bfloat16:
//
//   P  = exp2(scale_log2 * S - lse_log2)   S = score(Q K^T), recomputed; score.cuh
//   dS = P * (dP - delta)                  dP = dO V^T; score_gradient.cuh
//   dV += P^T dO    dK += dS^T Q           in registers until the end
//   dQ += dS K                             in global memory (dq_accum, float32), since every key
//                                          tile contributes
//
// FlashBwdParams has the arrays with their shapes. flash_bwd_preprocess.cu comes before this kernel
// and flash_bwd_postprocess_sm80.cu after it. One block owns BLOCK_N keys of one key head, and
// walks over the tiles of BLOCK_M queries that see them, of every query head of the group.
//
// All warps do the same. P and dS go through shared memory once, so that each of the five products
// can be divided into the warp tiles that suit it best (WarpGrid). Shared memory holds K, V,
// NUM_STAGES buffers of Q and of dO, P and dS.
//
// Template parameters. T is the dtype of Q; HEAD_DIM is that of the tiles, and a smaller head_dim
// is filled up with zeros; ARCH is the compute capability (75 has no cp.async); SOFTCAP, ALIBI,
// BIAS (a BiasKind) and DROPOUT are the options of the score; SMEM_BYTES is the dynamic shared
// memory.
//
// Why nothing is overwritten too early. A __syncthreads() lies between the writes and the reads of
// each buffer, and between its reads and the next writes: one after Q and dO have landed, one after
// P and dS are complete, and with one stage a third before the next copy.
//
// Why it ends. For a deterministic sum (dq_semaphore) the blocks add to a query tile in the order
// of their keys, so blocks wait for each other. A block takes its tile by ticket, so it waits only
// for blocks that run already, and the earliest of them waits for none.
//
// Source: FlashAttention-2, arXiv:2307.08691, algorithm 2.
#include "../block_info.cuh"
#include "../params.cuh"
#include "../partial_gradient.cuh"
#include "../score_gradient.cuh"
#include "../store_rows.cuh"
#include "../tile_order.cuh"
#include "../warp_gemm.cuh"
#include "dq_sum.cuh"

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int NUM_WARPS, int NUM_STAGES,
          int ARCH, bool SOFTCAP, bool ALIBI, int BIAS, bool DROPOUT, int SMEM_BYTES>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    flash_bwd_sm80(const __grid_constant__ FlashBwdParams params) {
  using TileKV = SmemTile<BLOCK_N, HEAD_DIM>;
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using TileS = SmemTile<BLOCK_M, BLOCK_N>;
  using GridS = WarpGrid<BLOCK_M, BLOCK_N, NUM_WARPS>;
  using GridKV = WarpGrid<BLOCK_N, HEAD_DIM, NUM_WARPS>;
  using GridQ = WarpGrid<BLOCK_M, HEAD_DIM, NUM_WARPS>;
  static_assert(2 * TileKV::BYTES + 2 * NUM_STAGES * TileQ::BYTES + 2 * TileS::BYTES == SMEM_BYTES,
                "host and device disagree on shared memory");
  static_assert(ACCUM_ROW_ALIGN % BLOCK_M == 0, "a query tile must not straddle two sequences");
  using Options = ScoreOptions<T, SOFTCAP, ALIBI, static_cast<BiasKind>(BIAS), DROPOUT>;
  constexpr int NUM_THREADS = NUM_WARPS * 32;
  constexpr int M = GridS::M;
  constexpr int N = GridS::N;

  // ---- which tile ----
  const AttentionShape& shape = params.shape;
  __shared__ BwdBlock<T> block;
  __shared__ int64_t dropout_seed;
  if (threadIdx.x == 0) {
    block.locate(params, BLOCK_M, BLOCK_N);
    if constexpr (DROPOUT) dropout_seed = *params.dropout_seed;
  }
  __syncthreads();                // the tile is located
  if (block.n_rows <= 0) return;  // packed: past the end of this sequence

  // ---- first copies ----
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_k = smem_address(smem);
  const uint32_t smem_v = smem_k + TileKV::BYTES;
  const uint32_t smem_q = smem_v + TileKV::BYTES;
  const uint32_t smem_do = smem_q + NUM_STAGES * TileQ::BYTES;
  const uint32_t smem_p = smem_do + NUM_STAGES * TileQ::BYTES;
  const uint32_t smem_ds = smem_p + TileS::BYTES;

  const auto load_q_do = [&](int head, int m_block, int stage) {
    const int rows = block.sequence.seqlen_q - m_block * BLOCK_M;
    const int64_t row = int64_t(m_block) * BLOCK_M;
    load_tile<TileQ, NUM_THREADS, ARCH>(smem_q + stage * TileQ::BYTES,
                                        block.q + params.q_strides.at(0, row, head),
                                        params.q_strides.row, rows, shape.head_dim);
    load_tile<TileQ, NUM_THREADS, ARCH>(smem_do + stage * TileQ::BYTES,
                                        block.dout + params.dout_strides.at(0, row, head),
                                        params.dout_strides.row, rows, shape.head_dim);
  };
  load_tile<TileKV, NUM_THREADS, ARCH>(smem_k, block.k, params.k_strides.row, block.n_rows,
                                       shape.head_dim);
  load_tile<TileKV, NUM_THREADS, ARCH>(smem_v, block.v, params.v_strides.row, block.n_rows,
                                       shape.head_dim);
  int head = block.m_range.begin < block.m_range.end ? block.head_begin : block.head_end;
  int m_block = block.m_range.begin;
  int stage = 0;
  if (head < block.head_end) load_q_do(head, m_block, stage);
  copies_commit<ARCH>();

  const int lane = threadIdx.x % 32;
  float acc_dk[GridKV::M][GridKV::N][4];
  float acc_dv[GridKV::M][GridKV::N][4];
  set_zero(acc_dk);
  set_zero(acc_dv);

  // ---- over the query heads of the group and their query tiles ----
#pragma unroll 1
  while (head < block.head_end) {
    const bool last_m = m_block + 1 == block.m_range.end;
    const int next_head = last_m ? head + 1 : head;
    const int next_m_block = last_m ? block.m_range.begin : m_block + 1;

    copies_wait<ARCH>();
    __syncthreads();  // Q and dO have landed; no warp reads P, dS or the other stage any more
    if (NUM_STAGES == 2 && next_head < block.head_end) {
      load_q_do(next_head, next_m_block, stage ^ 1);
    }
    copies_commit<ARCH>();

    const uint32_t q_stage = smem_q + stage * TileQ::BYTES;
    const uint32_t do_stage = smem_do + stage * TileQ::BYTES;
    const int64_t accum_row =
        head * params.accum_rows + block.sequence.accum_start + m_block * BLOCK_M;
    const int row0 = GridS::row() + lane / 4;
    const int col = block.n_begin + GridS::col() + lane % 4 * 2;
    float lse_log2[M][2];
    float delta[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        lse_log2[m][half] = params.lse_log2[accum_row + row0 + m * 16 + half * 8];
        delta[m][half] = params.delta[accum_row + row0 + m * 16 + half * 8];
      }
    }

    // ---- S = Q K^T, score, P ----
    float acc_s[M][N][4];
    set_zero(acc_s);
    warp_gemm<T, ARCH, HEAD_DIM / 16>(acc_s, RowOperandA<TileQ>(q_stage, GridS::row()),
                                      RowOperandB<TileKV>(smem_k, GridS::col()));
    const Score<Options, FlashBwdParams> score(params);
    const float alibi_slope = load_alibi_slope<Options>(params, block.batch, head);
    const auto place_of = [&](int m) -> ScorePlace<Rows::QUERIES> {
      const int row = m_block * BLOCK_M + row0 + m * 16;
      return {block.sequence, block.batch, head, alibi_slope, &dropout_seed, row, col};
    };
    float slope[M][N][4];
    const bool masked = block.m_range.needs_mask(m_block) || block.n_rows < BLOCK_N;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const ScorePlace<Rows::QUERIES> at = place_of(m);
      apply_score(acc_s[m], slope[m], score, at);
      if (masked) score.apply_mask(acc_s[m], at);
      recompute_weights(acc_s[m], score, at, [&](int, int i) { return lse_log2[m][i / 2]; });
    }
    float kept[M][N][4];
    store_fragments<TileS, T, ARCH>(smem_p, GridS::row(), GridS::col(),
                                    kept_weights<Options>(kept, acc_s));

    // ---- dP = dO V^T, dS ----
    float acc_dp[M][N][4];
    set_zero(acc_dp);
    warp_gemm<T, ARCH, HEAD_DIM / 16>(acc_dp, RowOperandA<TileQ>(do_stage, GridS::row()),
                                      RowOperandB<TileKV>(smem_v, GridS::col()));
#pragma unroll
    for (int m = 0; m < M; ++m) {
      score_gradient<Options>(acc_dp[m], acc_s[m], slope[m], params, place_of(m),
                              [&](int, int i) { return delta[m][i / 2]; });
    }
    store_fragments<TileS, T, ARCH>(smem_ds, GridS::row(), GridS::col(), acc_dp);
    __syncthreads();  // P and dS are complete

    // ---- dV += P^T dO, dK += dS^T Q ----
    warp_gemm<T, ARCH, BLOCK_M / 16>(
        acc_dv, ColumnOperandA<TileS, GridKV::TILE_ROWS>(smem_p, GridKV::row()),
        ColumnOperandB<TileQ, GridKV::TILE_COLS>(do_stage, GridKV::col()));
    warp_gemm<T, ARCH, BLOCK_M / 16>(
        acc_dk, ColumnOperandA<TileS, GridKV::TILE_ROWS>(smem_ds, GridKV::row()),
        ColumnOperandB<TileQ, GridKV::TILE_COLS>(q_stage, GridKV::col()));
    if constexpr (NUM_STAGES == 1) {
      __syncthreads();  // no warp reads Q or dO any more
      if (next_head < block.head_end) load_q_do(next_head, next_m_block, 0);
      copies_commit<ARCH>();
    }

    // ---- dQ += dS K ----
    float acc_dq[GridQ::M][GridQ::N][4];
    set_zero(acc_dq);
    warp_gemm<T, ARCH, BLOCK_N / 16>(
        acc_dq, RowOperandA<TileS>(smem_ds, GridQ::row()),
        ColumnOperandB<TileKV, GridQ::TILE_COLS>(smem_k, GridQ::col()));
    add_dq<BLOCK_M, BLOCK_N, HEAD_DIM, GridQ>(params, block, accum_row, m_block, acc_dq);

    stage ^= NUM_STAGES - 1;
    head = next_head;
    m_block = next_m_block;
  }

  // ---- write dK and dV through the tiles of K and V ----
  copies_wait<ARCH>();
  __syncthreads();  // no warp reads K or V any more
#pragma unroll
  for (int m = 0; m < GridKV::M; ++m) {
#pragma unroll
    for (int n = 0; n < GridKV::N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc_dk[m][n][i] *= shape.scale;
        if constexpr (DROPOUT) acc_dv[m][n][i] *= shape.dropout_scale;
      }
    }
  }
  if (shape.group_shares > 1) {
    const int64_t row_k = block.sequence.start_k + block.n_begin + GridKV::row();
    const auto partial = [&](KeyGradient which) {
      return partial_gradient<HEAD_DIM>(params, which, block.share, block.batch, row_k,
                                        block.head_kv) +
             GridKV::col();
    };
    const int row_stride = shape.heads_kv * HEAD_DIM;
#pragma unroll
    for (int m = 0; m < GridKV::M; ++m) {
      const int64_t offset = int64_t(m) * 16 * row_stride;
      const int rows = block.n_rows - GridKV::row() - m * 16;
      store_float_rows(partial(KeyGradient::DK) + offset, row_stride, acc_dk[m], rows);
      store_float_rows(partial(KeyGradient::DV) + offset, row_stride, acc_dv[m], rows);
    }
    return;
  }
  store_fragments<TileKV, T, ARCH>(smem_k, GridKV::row(), GridKV::col(), acc_dk);
  store_fragments<TileKV, T, ARCH>(smem_v, GridKV::row(), GridKV::col(), acc_dv);
  __syncthreads();  // dK and dV are complete in shared memory
  store_tile<TileKV, NUM_THREADS>(block.dk, params.dk_strides.row, smem_k, block.n_rows,
                                  shape.head_dim);
  store_tile<TileKV, NUM_THREADS>(block.dv, params.dv_strides.row, smem_v, block.n_rows,
                                  shape.head_dim);
}
