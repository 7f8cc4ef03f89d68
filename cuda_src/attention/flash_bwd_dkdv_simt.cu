// FlashAttention backward in plain CUDA: dK and dV (flash_bwd_dq_simt.cu computes dQ).
//
// One block owns BLOCK_N keys of one key head, and walks over the tiles of 64 queries that see
// them, for every query head of the group. All products are transposed: keys are the rows of a tile
// and queries its columns.
//   P^T  = exp2(S^T - lse_log2)               S = score(Q K^T)
//   dV   = sum over queries of P^T dO
//   dT^T = P^T * (dP^T - delta) * dS/dT       dP^T = V dO^T, T = scale Q K^T, S = T without softcap
//   dK   = scale * sum over queries of dT^T Q
// Dropout sets P in dV, and dP, to 0 where it drops a weight, and scales them elsewhere.
// The blocks share nothing, so the result is deterministic and no block waits for another. The two
// accumulators fit the registers with BLOCK_N = 64 up to HEAD_DIM 128, and with 32 beyond.
// simt_tile.cuh has the map from threads to elements and the plan of shared memory; the template
// parameters are those of flash_fwd_simt.cu.
#include "simt_gemm.cuh"
#include "simt_score.cuh"
#include "tile_order.cuh"

template <typename T, int HEAD_DIM, int BLOCK_N, bool SOFTCAP, bool ALIBI, int BIAS, bool DROPOUT>
__global__ void __launch_bounds__(SIMT_THREADS, 2)
    flash_bwd_dkdv_simt(const FlashBwdParams params) {
  constexpr BiasKind BIAS_KIND = static_cast<BiasKind>(BIAS);
  constexpr int ROWS = BLOCK_N / 8;
  constexpr int BLOCK_M = SCORE_COLUMNS;
  __shared__ SimtStorage<ROWS, HEAD_DIM> smem;

  // ---- which tile ----
  // tile_of_block starts with the last tile; with a causal mask the first keys have the most work.
  const AttentionShape& shape = params.shape;
  const int blocks_per_head = ceil_div(shape.seqlen_k, BLOCK_N);
  const Tile tile = tile_of_block(blockIdx.x, blocks_per_head, shape.heads_kv, shape.batch,
                                  shape.heads_per_section);
  const Sequence sequence = load_sequence(params, tile.batch);
  const int n_begin = (blocks_per_head - 1 - tile.block) * BLOCK_N;
  const int n_rows = min(BLOCK_N, sequence.seqlen_k - n_begin);
  if (n_rows <= 0) return;  // packed: past the end of this sequence
  const TileRange m_range = query_tiles(sequence, n_begin, n_begin + n_rows, BLOCK_M);

  const int64_t start_k = sequence.start_k + n_begin;
  const auto k = head_matrix<const T>(params.k, params.k_strides, tile.batch, start_k, tile.head,
                                      n_rows, shape.head_dim);
  const auto v = head_matrix<const T>(params.v, params.v_strides, tile.batch, start_k, tile.head,
                                      n_rows, shape.head_dim);

  // ---- over the query heads of the group and their query tiles ----
  float acc_dk[ROWS][HEAD_DIM / 16] = {};
  float acc_dv[ROWS][HEAD_DIM / 16] = {};
  const int group = shape.heads_q / shape.heads_kv;
#pragma unroll 1
  for (int head = tile.head * group; head < (tile.head + 1) * group; ++head) {
    const auto q = head_matrix<const T>(params.q, params.q_strides, tile.batch, sequence.start_q,
                                        head, sequence.seqlen_q, shape.head_dim);
    const auto dout =
        head_matrix<const T>(params.dout, params.dout_strides, tile.batch, sequence.start_q, head,
                             sequence.seqlen_q, shape.head_dim);
    const int64_t accum_row = head * params.accum_rows + sequence.accum_start + thread_x();
    const float* lse_log2 = params.lse_log2 + accum_row;  // the thread's columns, +inf past the end
    const float* delta = params.delta + accum_row;
    const ScoreFunction<SOFTCAP, ALIBI> score(shape, params.alibi_slopes, params.alibi_batch_stride,
                                              tile.batch, head);
    using Bias = const BiasElement<T, BIAS_KIND>;
    const BiasHead<Bias> head_bias(static_cast<Bias*>(params.bias), params.bias_strides, sequence,
                                   tile.batch, head);
#pragma unroll 1
    for (int m = m_range.begin; m < m_range.end; ++m) {
      float acc_s[ROWS][4];
      multiply_transposed(acc_s, smem, k, q.from_row(m * BLOCK_M));
      // The scores of keys past the end must be masked: no log-sum-exp includes them, so their exp2
      // could overflow.
      const bool masked = m_range.needs_mask(m) || n_rows < BLOCK_N;
      const int first_distance =
          n_begin + thread_y() - (m * BLOCK_M + thread_x() + sequence.diagonal);
      const ThreadBias<Bias> bias(head_bias.transposed(), n_begin + thread_y(),
                                  m * BLOCK_M + thread_x());
      float p[ROWS][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float row_lse = lse_log2[m * BLOCK_M + column_offset(j)];
#pragma unroll
        for (int e = 0; e < ROWS; ++e) {
          const int distance = first_distance + row_offset<ROWS>(e) - column_offset(j);
          float derivative;
          float s = score.log2(acc_s[e][j], distance, derivative);
          if constexpr (BIAS_KIND != BiasKind::NONE)
            s = bias.add_to(s, row_offset<ROWS>(e), column_offset(j));
          const bool seen = !masked || (in_window(sequence, distance) &&
                                        row_offset<ROWS>(e) < n_rows - thread_y());
          p[e][j] = seen ? exp2_approx(s - row_lse) : 0.0f;
          acc_s[e][j] = p[e][j] * derivative;
        }
      }
      if constexpr (DROPOUT) {
        const SimtDropout dropout(params.dropout_seed, shape, tile.batch, head);
        dropout.mark<true>(acc_s, n_begin + thread_y(), m * BLOCK_M + thread_x());
#pragma unroll
        for (int e = 0; e < ROWS; ++e) {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            p[e][j] = is_kept(acc_s[e][j]) ? p[e][j] * shape.dropout_scale : 0.0f;
        }
      }
      store_weights(smem, p);
      multiply_add(acc_dv, smem, dout.from_row(m * BLOCK_M));
      if constexpr (SOFTCAP || DROPOUT) {
        __syncthreads();  // no thread reads P any more
        store_weights(smem, acc_s);
      }

      float acc_dp[ROWS][4];
      multiply_transposed(acc_dp, smem, v, dout.from_row(m * BLOCK_M));
      load_weights(acc_s, smem);  // P * dS/dT, which is P without softcap and dropout
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float row_delta = delta[m * BLOCK_M + column_offset(j)];
#pragma unroll
        for (int e = 0; e < ROWS; ++e)
          score_gradient<DROPOUT>(acc_s[e][j], acc_dp[e][j], row_delta, shape);
      }
      store_weights(smem, acc_s);  // dT
      multiply_add(acc_dk, smem, q.from_row(m * BLOCK_M));
    }
  }

  // ---- write dK and dV ----
  const auto dk = head_matrix<T>(params.dk, params.dk_strides, tile.batch, start_k, tile.head,
                                 n_rows, shape.head_dim);
  const auto dv = head_matrix<T>(params.dv, params.dv_strides, tile.batch, start_k, tile.head,
                                 n_rows, shape.head_dim);
  store_output<ROWS, HEAD_DIM>(dk, acc_dk, shape.scale);
  store_output<ROWS, HEAD_DIM>(dv, acc_dv, 1.0f);
}
