// The gradients of the captures of a text, behind the other kernels of a backward pass on tensor
// cores. It computes dS once more, as flash_bwd_sm80 does, and adds
//   dS * (derivative of the score by what was read)    to the gradient of each element that was
//   read
// in float32, or in exact sums (text/learning.cuh). A block owns BLOCK_N keys of one key head and
// walks over the tiles of BLOCK_M queries that see them, of every query head of the group. Each
// thread keeps the sum of the element that it has read last in registers, and adds it to memory
// when it reads another.
//
// Template parameters. T is the dtype of Q; HEAD_DIM is that of the tiles, and a smaller head_dim
// is filled up with zeros; ARCH is the compute capability (75 has no cp.async); BIAS (a BiasKind)
// and DROPOUT are the options of the score beside the text; SMEM_BYTES is the dynamic shared memory
// of the launch.
#include "../score_gradient.cuh"
#include "../text/reads.cuh"
#include "../warp_gemm.cuh"
#include "bwd_tile.cuh"
#include "bwd_warps.cuh"

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int NUM_WARPS, int ARCH, int BIAS,
          bool DROPOUT, int SMEM_BYTES>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    flash_bwd_captures_sm80(const __grid_constant__ FlashBwdParams params) {
  using TileKV = SmemTile<BLOCK_N, HEAD_DIM>;
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using GridS = WarpGrid<BLOCK_M, BLOCK_N, NUM_WARPS>;
  static_assert(2 * TileKV::BYTES + 2 * TileQ::BYTES == SMEM_BYTES,
                "host and device disagree on shared memory");
  using Options = ScoreOptions<T, false, false, static_cast<BiasKind>(BIAS), DROPOUT>;
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

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_k = smem_address(smem);
  const uint32_t smem_v = smem_k + TileKV::BYTES;
  const uint32_t smem_q = smem_v + TileKV::BYTES;
  const uint32_t smem_do = smem_q + TileQ::BYTES;
  load_tile<TileKV, NUM_THREADS, ARCH>(smem_k, block.k, params.k_strides.row, block.n_rows,
                                       shape.head_dim);
  load_tile<TileKV, NUM_THREADS, ARCH>(smem_v, block.v, params.v_strides.row, block.n_rows,
                                       shape.head_dim);

  const int lane = threadIdx.x % 32;
  const Captures captures = params;  // with the state of an evaluation
  ReadSums sums;

  // ---- over the query heads of the group and their query tiles ----
#pragma unroll 1
  for (int head = block.head_begin; head < block.head_end; ++head) {
#pragma unroll 1
    for (int m_block = block.m_range.begin; m_block < block.m_range.end; ++m_block) {
      const int rows = block.sequence.seqlen_q - m_block * BLOCK_M;
      const int64_t first = int64_t(m_block) * BLOCK_M;
      load_tile<TileQ, NUM_THREADS, ARCH>(smem_q, block.q + params.q_strides.at(0, first, head),
                                          params.q_strides.row, rows, shape.head_dim);
      load_tile<TileQ, NUM_THREADS, ARCH>(smem_do,
                                          block.dout + params.dout_strides.at(0, first, head),
                                          params.dout_strides.row, rows, shape.head_dim);
      copies_commit<ARCH>();
      copies_wait<ARCH>();
      __syncthreads();  // all tiles have landed

      // ---- S = Q K^T, dP = dO V^T ----
      float acc_s[M][N][4], acc_dp[M][N][4];
      set_zero(acc_s);
      set_zero(acc_dp);
      warp_gemm<T, ARCH, HEAD_DIM / 16>(acc_s, RowOperandA<TileQ>(smem_q, GridS::row()),
                                        RowOperandB<TileKV>(smem_k, GridS::col()));
      warp_gemm<T, ARCH, HEAD_DIM / 16>(acc_dp, RowOperandA<TileQ>(smem_do, GridS::row()),
                                        RowOperandB<TileKV>(smem_v, GridS::col()));
      __syncthreads();  // no warp reads Q or dO any more

      // ---- dS, and what each score has read ----
      const Score<Options, FlashBwdParams> score(params);
      const int64_t accum_row =
          head * params.accum_rows + block.sequence.accum_start + m_block * BLOCK_M;
      const bool masked = block.m_range.needs_mask(m_block) || block.n_rows < BLOCK_N;
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const int row = GridS::row() + lane / 4 + m * 16;
        const int col = block.n_begin + GridS::col() + lane % 4 * 2;
        const float no_slope = 0.f;
        const ScorePlace<Rows::QUERIES> at = {
            block.sequence,          block.batch, head, no_slope, &dropout_seed,
            m_block * BLOCK_M + row, col};
        float s[N][4];
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s[n][i] = acc_s[m][n][i];
        }
        score.template for_each_place<true>(
            s, at, MASKED, [&](float& x, int, int, int query, int key) {
              text::start_reads(captures);
              x = text::user_score(text::Dual(score.inner * x), block.batch, head, query, key,
                                   captures)
                      .value;
            });
        score.apply_position_terms(s, at);
        if (masked) score.apply_mask(s, at);
        recompute_weights(s, score, at,
                          [&](int, int i) { return params.lse_log2[accum_row + row + i / 2 * 8]; });
        softmax_gradient<Options>(acc_dp[m], s, shape, [&](int, int i) {
          return params.delta[accum_row + row + i / 2 * 8];
        });
        score.template for_each_place<true>(
            acc_dp[m], at, MASKED, [&](float& ds, int n, int i, int query, int key) {
              sums.add(ds, score.inner * acc_s[m][n][i], block.batch, head, query, key, captures);
            });
      }
    }
  }
  sums.flush();
}
