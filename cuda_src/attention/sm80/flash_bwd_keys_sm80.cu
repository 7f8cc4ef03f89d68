// FlashAttention-2 backward on mma.sync for narrow heads (sm_80 and newer), in which each warp owns
// keys. It computes what flash_bwd_sm80.cu computes, from the same arrays, but has no options of
// the score:
//
//   P^T  = exp2(scale_log2 * S^T - lse_log2)    S^T = K Q^T
//   dS^T = P^T * (dP^T - delta)                 dP^T = V dO^T
//   dV += P^T dO    dK += dS^T Q                in registers until the end
//   dQ += dS K                                  in global memory (dq_accum, float32)
//
// A warp has BLOCK_N / NUM_WARPS keys and all queries of a tile, STEP_M of them at a time. So P^T
// and dS^T lie in registers as dV and dK need them, and only dS goes through shared memory, for dQ.
// Both go through it in flash_bwd_sm80.cu, and at head dim 64 that kernel needs shared memory for
// longer than the tensor cores. This one moves a seventh less, and its blocks are small enough for
// two on a multiprocessor, of which one computes its softmax beside the products of the other. A
// warp holds the sums of its keys over the whole head dim, for wide heads too many registers.
//
// Template parameters. T is the dtype of Q; HEAD_DIM is that of the tiles, and a smaller head_dim
// is filled up with zeros; ARCH is the compute capability; SMEM_BYTES is the dynamic shared memory:
// K, V, Q and dO, dS, and lse_log2 and delta of the queries.
//
// Why nothing is overwritten too early. There are two barriers a tile: one after Q and dO have
// landed, and one after dS is complete. All reads of Q and dO lie between the first and the second,
// and the next copy comes after the second. All reads of dS lie between the second and the next
// first, and its writes after a first. Why it ends: as flash_bwd_sm80.cu.
//
// Source: FlashAttention-2, arXiv:2307.08691, algorithm 2.
#include "../block_info.cuh"
#include "../params.cuh"
#include "../partial_gradient.cuh"
#include "../score_gradient.cuh"
#include "../store_rows.cuh"
#include "../tile_order.cuh"
#include "../warp_gemm.cuh"
#include "bwd_tile.cuh"
#include "bwd_warps.cuh"
#include "dq_sum.cuh"

constexpr int BLOCKS = 2;   // on a multiprocessor
constexpr int STEP_M = 32;  // queries whose scores a warp holds

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int NUM_WARPS, int ARCH,
          int SMEM_BYTES>
__global__ void __launch_bounds__(NUM_WARPS * 32, BLOCKS)
    flash_bwd_keys_sm80(const __grid_constant__ FlashBwdParams params) {
  using TileKV = SmemTile<BLOCK_N, HEAD_DIM>;
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using TileS = SmemTile<BLOCK_N, BLOCK_M>;  // of the transpose
  using GridQ = WarpGrid<BLOCK_M, HEAD_DIM, NUM_WARPS>;
  constexpr int ROW_BYTES = BLOCK_M * 4;  // of lse_log2, or of delta
  static_assert(2 * (TileKV::BYTES + TileQ::BYTES + ROW_BYTES) + TileS::BYTES == SMEM_BYTES,
                "host and device disagree on shared memory");
  static_assert(ACCUM_ROW_ALIGN % BLOCK_M == 0, "a query tile must not straddle two sequences");
  static_assert(ARCH >= 80, "sm_75 has no cp.async");
  using Options = ScoreOptions<T, false, false, BiasKind::NONE, false>;
  constexpr int NUM_THREADS = NUM_WARPS * 32;
  constexpr int M = BLOCK_N / NUM_WARPS / 16;
  constexpr int N = STEP_M / 8;

  // ---- which tile ----
  const AttentionShape& shape = params.shape;
  __shared__ BwdBlock<T> block;
  if (threadIdx.x == 0) block.locate(params, BLOCK_M, BLOCK_N);
  __syncthreads();                // the tile is located
  if (block.n_rows <= 0) return;  // packed: past the end of this sequence

  // ---- first copies ----
  extern __shared__ __align__(128) unsigned char smem[];
  const uint32_t smem_k = smem_address(smem);
  const uint32_t smem_v = smem_k + TileKV::BYTES;
  const uint32_t smem_q = smem_v + TileKV::BYTES;
  const uint32_t smem_do = smem_q + TileQ::BYTES;
  const uint32_t smem_ds = smem_do + TileQ::BYTES;
  unsigned char* smem_rows = smem + SMEM_BYTES - 2 * ROW_BYTES;

  const auto load_queries = [&](int head, int m_block) {
    const int rows = block.sequence.seqlen_q - m_block * BLOCK_M;
    const int64_t row = int64_t(m_block) * BLOCK_M;
    load_tile<TileQ, NUM_THREADS, ARCH>(smem_q, block.q + params.q_strides.at(0, row, head),
                                        params.q_strides.row, rows, shape.head_dim);
    load_tile<TileQ, NUM_THREADS, ARCH>(smem_do, block.dout + params.dout_strides.at(0, row, head),
                                        params.dout_strides.row, rows, shape.head_dim);
    // lse_log2, then delta, four numbers a thread
    const int thread = fresh_thread_index();
    if (thread < BLOCK_M / 2) {
      const int64_t accum_row = head * params.accum_rows + block.sequence.accum_start + row;
      const float* from = thread < BLOCK_M / 4 ? params.lse_log2 : params.delta;
      cp_async_16(smem_address(smem_rows) + thread * 16,
                  from + accum_row + thread % (BLOCK_M / 4) * 4, true);
    }
  };
  load_tile<TileKV, NUM_THREADS, ARCH>(smem_k, block.k, params.k_strides.row, block.n_rows,
                                       shape.head_dim);
  load_tile<TileKV, NUM_THREADS, ARCH>(smem_v, block.v, params.v_strides.row, block.n_rows,
                                       shape.head_dim);
  int head = block.m_range.begin < block.m_range.end ? block.head_begin : block.head_end;
  int m_block = block.m_range.begin;
  if (head < block.head_end) load_queries(head, m_block);
  copies_commit<ARCH>();

  const int lane = threadIdx.x % 32;
  const int warp_key = threadIdx.x / 32 * M * 16;
  const RowOperandA<TileKV> operand_k(smem_k, warp_key);
  const RowOperandA<TileKV> operand_v(smem_v, warp_key);
  const uint32_t store_ds = smem_ds + TileS::offset(warp_key + lane / 4, 0) + lane % 4 * 4;
  const auto* row_constants = reinterpret_cast<const float2*>(smem_rows) + lane % 4;
  float acc_dk[M][HEAD_DIM / 8][4];
  float acc_dv[M][HEAD_DIM / 8][4];
  set_zero(acc_dk);
  set_zero(acc_dv);

  // ---- over the query heads of the group and their query tiles ----
#pragma unroll 1
  while (head < block.head_end) {
    copies_wait<ARCH>();
    __syncthreads();  // Q and dO have landed; no warp reads dS any more

    const Score<Options, FlashBwdParams> score(params);
    const bool masked = block.m_range.needs_mask(m_block) || block.n_rows < BLOCK_N;
#pragma unroll
    for (int row = 0; row < BLOCK_M; row += STEP_M) {
      // ---- S^T = K Q^T, P^T ----
      float acc_s[M][N][4];
      set_zero(acc_s);
      warp_gemm<T, ARCH, HEAD_DIM / 16>(acc_s, operand_k, RowOperandB<TileQ>(smem_q, row));
      float2 lse_log2[N];
#pragma unroll
      for (int n = 0; n < N; ++n) lse_log2[n] = row_constants[(row + n * 8) / 2];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const ScorePlace<Rows::KEYS> at = {
            block.sequence,
            block.batch,
            head,
            0.f,
            nullptr,
            block.n_begin + warp_key + m * 16 + lane / 4,
            m_block * BLOCK_M + row + lane % 4 * 2,
        };
        if (masked) score.apply_mask(acc_s[m], at);
        recompute_weights(acc_s[m], score, at,
                          [&](int n, int i) { return i % 2 ? lse_log2[n].y : lse_log2[n].x; });
      }

      // ---- dV += P^T dO ----
      const uint32_t step_bytes = row * TileQ::ROW_BYTES;
      const RegisterOperandA<T, ARCH, M, N> operand_p(acc_s);
      warp_gemm<T, ARCH, STEP_M / 16>(acc_dv, operand_p,
                                      ColumnOperandB<TileQ, HEAD_DIM>(smem_do + step_bytes, 0));

      // ---- dP^T = V dO^T, dS^T ----
      float acc_dp[M][N][4];
      set_zero(acc_dp);
      warp_gemm<T, ARCH, HEAD_DIM / 16>(acc_dp, operand_v, RowOperandB<TileQ>(smem_do, row));
      float2 delta[N];
#pragma unroll
      for (int n = 0; n < N; ++n) delta[n] = row_constants[(BLOCK_M + row + n * 8) / 2];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        softmax_gradient<Options>(acc_dp[m], acc_s[m], shape,
                                  [&](int n, int i) { return i % 2 ? delta[n].y : delta[n].x; });
      }
      const RegisterOperandA<T, ARCH, M, N> operand_ds(acc_dp);
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < N * 2; ++i) {
          st_shared_32(TileS::advance(store_ds, m * 16 + i % 2 * 8, row / 8 + i / 2),
                       operand_ds.fragment[m][i / 4][i % 4]);
        }
      }

      // ---- dK += dS^T Q ----
      warp_gemm<T, ARCH, STEP_M / 16>(acc_dk, operand_ds,
                                      ColumnOperandB<TileQ, HEAD_DIM>(smem_q + step_bytes, 0));
    }
    __syncthreads();  // dS is complete; no warp reads Q or dO any more

    const int64_t accum_row =
        head * params.accum_rows + block.sequence.accum_start + m_block * BLOCK_M;
    const int this_m_block = m_block++;
    if (m_block == block.m_range.end) {
      m_block = block.m_range.begin;
      ++head;
    }
    if (head < block.head_end) load_queries(head, m_block);
    copies_commit<ARCH>();

    // ---- dQ += dS K ----
    float acc_dq[GridQ::M][GridQ::N][4];
    set_zero(acc_dq);
    warp_gemm<T, ARCH, BLOCK_N / 16>(
        acc_dq, ColumnOperandA<TileS, GridQ::TILE_ROWS>(smem_ds, GridQ::row()),
        ColumnOperandB<TileKV, GridQ::TILE_COLS>(smem_k, GridQ::col()));
    add_dq<BLOCK_M, BLOCK_N, HEAD_DIM, GridQ, DqAddresses::ONE>(params, block, accum_row,
                                                                this_m_block, acc_dq);
  }

  // ---- write dK and dV through the tiles of K and V ----
  copies_wait<ARCH>();
  __syncthreads();  // no warp reads K or V any more
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc_dk[m][d][i] *= shape.scale;
    }
  }
  if (shape.group_shares > 1) {
    const int64_t row_k = block.sequence.start_k + block.n_begin + warp_key;
    const auto partial = [&](KeyGradient which) {
      return partial_gradient<HEAD_DIM>(params, which, block.share, block.batch, row_k,
                                        block.head_kv);
    };
    const int row_stride = shape.heads_kv * HEAD_DIM;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const int64_t offset = int64_t(m) * 16 * row_stride;
      const int rows = block.n_rows - warp_key - m * 16;
      store_float_rows(partial(KeyGradient::DK) + offset, row_stride, acc_dk[m], rows);
      store_float_rows(partial(KeyGradient::DV) + offset, row_stride, acc_dv[m], rows);
    }
    return;
  }
  store_fragments<TileKV, T, ARCH>(smem_k, warp_key, 0, acc_dk);
  store_fragments<TileKV, T, ARCH>(smem_v, warp_key, 0, acc_dv);
  __syncthreads();  // dK and dV are complete in shared memory
  store_tile<TileKV, NUM_THREADS>(block.dk, params.dk_strides.row, smem_k, block.n_rows,
                                  shape.head_dim);
  store_tile<TileKV, NUM_THREADS>(block.dv, params.dv_strides.row, smem_v, block.n_rows,
                                  shape.head_dim);
}
