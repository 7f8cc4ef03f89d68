// FlashAttention-2 backward in float32 on mma.sync (sm_75 and newer), by three float16 products
// (parts.cuh):
//
//   P  = exp2(scale_log2 * S - lse_log2)   S = score(Q K^T), recomputed; score.cuh
//   dS = P * (dP - delta)                  dP = dO V^T; score_gradient.cuh
//   dV += P^T dO    dK += dS^T Q           in registers until the end
//   dQ += dS K                             in dq_accum (float32, in global memory)
//
// fp16x3_ranges.cu, fp16x3_split.cu and flash_bwd_preprocess.cu come before it, and
// flash_bwd_postprocess_fp16x3.cu after it. The blocks, the warps, the plan of shared memory and
// the order of a deterministic sum are those of flash_bwd_sm80.cu; each tile in shared memory has
// PARTS float16 parts. P and dS are split where they are stored, and their scales too are powers of
// two (gradient_exponent), which the end of the kernel and the postprocess take away.
//
// Template parameters: those of flash_fwd_fp16x3.cu, and NUM_STAGES, the buffers of Q and of dO.
//
// Why nothing is overwritten too early, and why the kernel ends: as in flash_bwd_sm80.cu.
#include "../score_gradient.cuh"
#include "../sm80/dq_sum.cuh"
#include "parts.cuh"

// The part of a block that BwdBlock lacks.
struct BwdParts {
  const half_t* q;  // the first query of this sequence in head 0
  const half_t* dout;
  const half_t* k;
  const half_t* v;
  float from_scaled_s;   // 2^-e of Q K^T
  float from_scaled_dp;  // 2^-e of dO V^T
  float to_scaled_ds;
  float from_scaled_dk;
  float from_scaled_dv;
};

template <int HEAD_DIM>
__device__ __forceinline__ BwdParts locate_parts(const Fp16x3BwdParams& params,
                                                 const BwdBlock<float>& block) {
  const AttentionShape& shape = params.base.shape;
  const SplitInputs& split = params.split;
  const HeadRange& range = split.ranges[int64_t(block.batch) * shape.heads_kv + block.head_kv];
  const int64_t first_q = params.base.cu_seqlens_q ? 0 : int64_t(block.batch) * shape.seqlen_q;
  const int64_t first_k = params.base.cu_seqlens_k ? 0 : int64_t(block.batch) * shape.seqlen_k;
  const int64_t row_q = first_q + block.sequence.start_q;
  const int64_t row_k = first_k + block.sequence.start_k + block.n_begin;
  const int q = scale_exponent(range, SplitTensor::Q);
  const int k = scale_exponent(range, SplitTensor::K);
  const int v = scale_exponent(range, SplitTensor::V);
  const int dout = scale_exponent(range, SplitTensor::DOUT);
  const int ds = gradient_exponent(range, shape);
  return {head_parts<HEAD_DIM>(split.q, split.rows_q, 0, row_q),
          head_parts<HEAD_DIM>(split.dout, split.rows_q, 0, row_q),
          head_parts<HEAD_DIM>(split.k, split.rows_k, block.head_kv, row_k),
          head_parts<HEAD_DIM>(split.v, split.rows_k, block.head_kv, row_k),
          power_of_two(-q - k),
          power_of_two(-v - dout),
          power_of_two(ds),
          shape.scale * power_of_two(-ds) * power_of_two(-q),
          shape.dropout_scale * power_of_two(-dout) / WEIGHT_SCALE};
}

// sum += the product of two operands of parts, COLUMNS * 8 columns at a time: those are the
// accumulators beside the sum.
template <int PARTS, int ARCH, int K_STEPS, int COLUMNS, class A, class B, int M, int N>
__device__ __forceinline__ void add_product(float (&sum)[M][N][4], const A& a, const B& b) {
#pragma unroll
  for (int column = 0; column < N; column += COLUMNS) {
    float acc[M][COLUMNS][4];
    product_of_parts<PARTS, ARCH, K_STEPS>(acc, a, b, column / 2);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][column + n][i] += acc[m][n][i];
      }
    }
  }
}

template <int HEAD_DIM, int BLOCK_M, int BLOCK_N, int NUM_WARPS, int NUM_STAGES, int PARTS,
          int ARCH, bool SOFTCAP, bool ALIBI, int BIAS, bool DROPOUT, int SMEM_BYTES>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    flash_bwd_fp16x3(const __grid_constant__ Fp16x3BwdParams params) {
  using TileKV = SmemTile<BLOCK_N, HEAD_DIM>;
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using TileS = SmemTile<BLOCK_M, BLOCK_N>;
  using GridS = WarpGrid<BLOCK_M, BLOCK_N, NUM_WARPS>;
  using GridKV = WarpGrid<BLOCK_N, HEAD_DIM, NUM_WARPS>;
  using GridQ = WarpGrid<BLOCK_M, HEAD_DIM, NUM_WARPS>;
  constexpr int KV_BYTES = PARTS * TileKV::BYTES;
  constexpr int Q_BYTES = PARTS * TileQ::BYTES;
  constexpr int S_BYTES = PARTS * TileS::BYTES;
  static_assert(2 * KV_BYTES + 2 * NUM_STAGES * Q_BYTES + 2 * S_BYTES == SMEM_BYTES,
                "host and device disagree on shared memory");
  static_assert(ACCUM_ROW_ALIGN % BLOCK_M == 0, "a query tile must not straddle two sequences");
  constexpr bool TF32 = PARTS == 1;
  using Options = ScoreOptions<float, SOFTCAP, ALIBI, static_cast<BiasKind>(BIAS), DROPOUT, !TF32>;
  constexpr int NUM_THREADS = NUM_WARPS * 32;
  constexpr int M = GridS::M;
  constexpr int N = GridS::N;
  // Columns / 8 of dK and dV, and of dQ, in one product, whose accumulators are extra registers.
  constexpr bool CROWDED = SOFTCAP || has_gradient(static_cast<BiasKind>(BIAS));
  constexpr int KV_COLUMNS = HEAD_DIM <= 128 ? GridKV::N : CROWDED ? 2 : 4;
  constexpr int Q_COLUMNS = HEAD_DIM <= 128 ? GridQ::N : CROWDED ? 2 : 4;

  // ---- which tile ----
  const AttentionShape& shape = params.base.shape;
  __shared__ BwdBlock<float> block;
  __shared__ BwdParts parts;
  __shared__ bool served;
  __shared__ int64_t dropout_seed;
  if (threadIdx.x == 0) {
    block.locate(params.base, BLOCK_M, BLOCK_N);
    if constexpr (DROPOUT) dropout_seed = *params.base.dropout_seed;
    if (block.n_rows > 0) parts = locate_parts<HEAD_DIM>(params, block);
  }
  if (threadIdx.x < 32) {
    __syncwarp();  // the sequence is known
    const bool serves = fp16x3_serves(params.split, block.batch, shape.heads_kv);
    if (threadIdx.x == 0) served = serves;
  }
  __syncthreads();                           // the tile is located
  if (block.n_rows <= 0 || !served) return;  // past the end, or for other kernels

  // ---- first copies ----
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_k = smem_address(smem);
  const uint32_t smem_v = smem_k + KV_BYTES;
  const uint32_t smem_q = smem_v + KV_BYTES;
  const uint32_t smem_do = smem_q + NUM_STAGES * Q_BYTES;
  const uint32_t smem_p = smem_do + NUM_STAGES * Q_BYTES;
  const uint32_t smem_ds = smem_p + S_BYTES;

  const auto load_q_do = [&](int head, int m_block, int stage) {
    const int rows = block.sequence.seqlen_q - m_block * BLOCK_M;
    const int64_t row = head * params.split.rows_q + int64_t(m_block) * BLOCK_M;
    const int64_t to_low = shape.heads_q * params.split.rows_q * HEAD_DIM;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const uint32_t to = stage * Q_BYTES + part * TileQ::BYTES;
      const int64_t from = row * HEAD_DIM + part * to_low;
      load_tile<TileQ, NUM_THREADS, ARCH>(smem_q + to, parts.q + from, HEAD_DIM, rows, HEAD_DIM);
      load_tile<TileQ, NUM_THREADS, ARCH>(smem_do + to, parts.dout + from, HEAD_DIM, rows,
                                          HEAD_DIM);
    }
  };
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const int64_t from = part * shape.heads_kv * params.split.rows_k * HEAD_DIM;
    load_tile<TileKV, NUM_THREADS, ARCH>(smem_k + part * TileKV::BYTES, parts.k + from, HEAD_DIM,
                                         block.n_rows, HEAD_DIM);
    load_tile<TileKV, NUM_THREADS, ARCH>(smem_v + part * TileKV::BYTES, parts.v + from, HEAD_DIM,
                                         block.n_rows, HEAD_DIM);
  }
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

    const uint32_t q_stage = smem_q + stage * Q_BYTES;
    const uint32_t do_stage = smem_do + stage * Q_BYTES;
    const int64_t accum_row =
        head * params.base.accum_rows + block.sequence.accum_start + m_block * BLOCK_M;
    const int row0 = GridS::row() + lane / 4;
    const int col = block.n_begin + GridS::col() + lane % 4 * 2;
    float lse_log2[M][2];
    float delta[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        lse_log2[m][half] = params.base.lse_log2[accum_row + row0 + m * 16 + half * 8];
        delta[m][half] = params.base.delta[accum_row + row0 + m * 16 + half * 8];
      }
    }

    // ---- S = Q K^T, score, P ----
    float acc_s[M][N][4];
    product_of_parts<PARTS, ARCH, HEAD_DIM / 16, SCORE_STEPS<HEAD_DIM>>(
        acc_s, RowParts<RowOperandA<TileQ>, TileQ>(q_stage, GridS::row()),
        RowParts<RowOperandB<TileKV>, TileKV>(smem_k, GridS::col()));
    Score<Options, FlashBwdParams> score(params.base);
    (Options::HAS_SLOPE ? score.inner : score.scale_log2) *= parts.from_scaled_s;
    const float alibi_slope = load_alibi_slope<Options>(params.base, block.batch, head);
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
    store_parts<TileS, PARTS, ARCH>(smem_p, GridS::row(), GridS::col(),
                                    kept_weights<Options>(kept, acc_s), WEIGHT_SCALE);

    // ---- dP = dO V^T, dS ----
    float acc_dp[M][N][4];
    product_of_parts<PARTS, ARCH, HEAD_DIM / 16>(
        acc_dp, RowParts<RowOperandA<TileQ>, TileQ>(do_stage, GridS::row()),
        RowParts<RowOperandB<TileKV>, TileKV>(smem_v, GridS::col()));
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc_dp[m][n][i] *= parts.from_scaled_dp;
      }
      score_gradient<Options>(acc_dp[m], acc_s[m], slope[m], params.base, place_of(m),
                              [&](int, int i) { return delta[m][i / 2]; });
    }
    store_parts<TileS, PARTS, ARCH>(smem_ds, GridS::row(), GridS::col(), acc_dp,
                                    parts.to_scaled_ds);
    __syncthreads();  // P and dS are complete

    // ---- dV += P^T dO, dK += dS^T Q ----
    using WeightsA = ColumnParts<ColumnOperandA<TileS, GridKV::TILE_ROWS>, TileS>;
    using RowsB = ColumnParts<ColumnOperandB<TileQ, GridKV::TILE_COLS>, TileQ>;
    add_product<PARTS, ARCH, BLOCK_M / 16, KV_COLUMNS>(acc_dv, WeightsA(smem_p, GridKV::row()),
                                                       RowsB(do_stage, GridKV::col()));
    add_product<PARTS, ARCH, BLOCK_M / 16, KV_COLUMNS>(acc_dk, WeightsA(smem_ds, GridKV::row()),
                                                       RowsB(q_stage, GridKV::col()));
    if constexpr (NUM_STAGES == 1) {
      __syncthreads();  // no warp reads Q or dO any more
      if (next_head < block.head_end) load_q_do(next_head, next_m_block, 0);
      copies_commit<ARCH>();
    }

    // ---- dQ += dS K ----
    const RowParts<RowOperandA<TileS>, TileS> operand_ds(smem_ds, GridQ::row());
    const ColumnParts<ColumnOperandB<TileKV, GridQ::TILE_COLS>, TileKV> operand_k(smem_k,
                                                                                  GridQ::col());
    const DqTurn<BLOCK_M, BLOCK_N, BwdBlock<float>> turn(params.base, block, accum_row, m_block);
#pragma unroll
    for (int column = 0; column < GridQ::N; column += Q_COLUMNS) {
      float acc_dq[GridQ::M][Q_COLUMNS][4];
      product_of_parts<PARTS, ARCH, BLOCK_N / 16>(acc_dq, operand_ds, operand_k, column / 2);
      if (column == 0) turn.wait();
      add_columns_of_dq<HEAD_DIM, GridQ>(params.base, accum_row, column, acc_dq);
    }
    turn.release();

    stage ^= NUM_STAGES - 1;
    head = next_head;
    m_block = next_m_block;
  }

  // ---- write dK and dV ----
  copies_wait<ARCH>();
  store_gradient(block.dk, params.base.dk_strides.row, GridKV::row(), block.n_rows, GridKV::col(),
                 shape.head_dim, acc_dk, parts.from_scaled_dk);
  store_gradient(block.dv, params.base.dv_strides.row, GridKV::row(), block.n_rows, GridKV::col(),
                 shape.head_dim, acc_dv, parts.from_scaled_dv);
}
