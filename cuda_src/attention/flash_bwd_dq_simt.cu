// FlashAttention backward in plain CUDA: dQ, and the gradient of a bias (flash_bwd_dkdv_simt.cu
// computes dK and dV).
//
// One block owns BLOCK_M queries of one head, and walks over the key tiles that they see, as the
// forward pass does. It recomputes P from the log-sum-exp:
//   P  = exp2(S - lse_log2)            S = score(Q K^T)
//   dT = P * (dP - delta) * dS/dT      dP = dO V^T, T = scale Q K^T, S = T without softcap
//   dQ = scale * sum over keys of dT K
// With a bias it also adds dS = P * (dP - delta) to the gradient of the bias. Dropout sets dP to 0
// where it drops a weight, and scales it elsewhere. Blocks share nothing but the gradient of a
// bias, so dQ is deterministic and no block waits for another. simt_tile.cuh has the map from
// threads to elements and the plan of shared memory; the template parameters are those of
// flash_fwd_simt.cu.
#include "simt_gemm.cuh"
#include "simt_score.cuh"
#include "tile_order.cuh"

template <typename T, int HEAD_DIM, int BLOCK_M, bool SOFTCAP, bool ALIBI, int BIAS, bool DROPOUT>
__global__ void __launch_bounds__(SIMT_THREADS, HEAD_DIM <= 64 && BIAS == 0 && !DROPOUT ? 3 : 2)
    flash_bwd_dq_simt(const FlashBwdParams params) {
  constexpr BiasKind BIAS_KIND = static_cast<BiasKind>(BIAS);
  constexpr int ROWS = BLOCK_M / 8;
  constexpr int BLOCK_N = SCORE_COLUMNS;
  __shared__ SimtStorage<ROWS, HEAD_DIM> smem;

  // ---- which tile ----
  const AttentionShape& shape = params.shape;
  const Tile tile = tile_of_block(blockIdx.x, ceil_div(shape.seqlen_q, BLOCK_M), shape.heads_q,
                                  shape.batch, shape.heads_per_section);
  const Sequence sequence = load_sequence(params, tile.batch);
  const int m_begin = tile.block * BLOCK_M;
  const int m_rows = min(BLOCK_M, sequence.seqlen_q - m_begin);
  if (m_rows <= 0) return;  // packed: past the end of this sequence
  const TileRange n_range = key_tiles(sequence, m_begin, m_begin + m_rows, BLOCK_N);

  const int64_t start_q = sequence.start_q + m_begin;
  const int head_kv = tile.head / (shape.heads_q / shape.heads_kv);
  const auto q = head_matrix<const T>(params.q, params.q_strides, tile.batch, start_q, tile.head,
                                      m_rows, shape.head_dim);
  const auto dout = head_matrix<const T>(params.dout, params.dout_strides, tile.batch, start_q,
                                         tile.head, m_rows, shape.head_dim);
  const auto k = head_matrix<const T>(params.k, params.k_strides, tile.batch, sequence.start_k,
                                      head_kv, sequence.seqlen_k, shape.head_dim);
  const auto v = head_matrix<const T>(params.v, params.v_strides, tile.batch, sequence.start_k,
                                      head_kv, sequence.seqlen_k, shape.head_dim);
  const int64_t accum_row =
      tile.head * params.accum_rows + sequence.accum_start + m_begin + thread_y();
  const float* lse_log2 = params.lse_log2 + accum_row;  // the thread's rows, +inf past the end
  const float* delta = params.delta + accum_row;
  const ScoreFunction<SOFTCAP, ALIBI> score(shape, params.alibi_slopes, params.alibi_batch_stride,
                                            tile.batch, tile.head);
  using Bias = const BiasElement<T, BIAS_KIND>;
  const BiasHead<Bias> head_bias(static_cast<Bias*>(params.bias), params.bias_strides, sequence,
                                 tile.batch, tile.head);
  const BiasHead<float> head_dbias(params.dbias, params.dbias_strides, sequence, tile.batch,
                                   tile.head);
  // The gradient of the bias is dS and not dT, so with a softcap the kernel needs both.
  constexpr bool HAS_DBIAS = has_gradient(BIAS_KIND);
  constexpr bool SEPARATE = HAS_DBIAS && SOFTCAP;

  // ---- over the key tiles ----
  float acc_dq[ROWS][HEAD_DIM / 16] = {};
#pragma unroll 1
  for (int n = n_range.begin; n < n_range.end; ++n) {
    float acc_s[ROWS][4];
    multiply_transposed(acc_s, smem, q, k.from_row(n * BLOCK_N));
    const bool masked = n_range.needs_mask(n);
    const int first_col = n * BLOCK_N + thread_x();
    const int first_distance = first_col - (m_begin + thread_y() + sequence.diagonal);
    const int columns = sequence.seqlen_k - first_col;
    const ThreadBias<Bias> bias(head_bias, m_begin + thread_y(), first_col);
    float derivatives[SEPARATE ? ROWS : 1][4];
#pragma unroll
    for (int e = 0; e < ROWS; ++e) {
      const float row_lse = lse_log2[row_offset<ROWS>(e)];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int distance = first_distance + column_offset(j) - row_offset<ROWS>(e);
        float derivative;
        float s = score.log2(acc_s[e][j], distance, derivative);
        if constexpr (BIAS_KIND != BiasKind::NONE)
          s = bias.add_to(s, row_offset<ROWS>(e), column_offset(j));
        if constexpr (SEPARATE) {
          derivatives[e][j] = derivative;
          derivative = 1.0f;
        }
        const bool seen = !masked || (in_window(sequence, distance) && column_offset(j) < columns);
        acc_s[e][j] = seen ? exp2_approx(s - row_lse) * derivative : 0.0f;
      }
    }
    if constexpr (DROPOUT) {
      const SimtDropout dropout(params.dropout_seed, shape, tile.batch, tile.head);
      dropout.mark<false>(acc_s, m_begin + thread_y(), first_col);
    }
    store_weights(smem, acc_s);  // P * dS/dT, or P if dS is needed too

    float acc_dp[ROWS][4];
    multiply_transposed(acc_dp, smem, dout, v.from_row(n * BLOCK_N));
    load_weights(acc_s, smem);
#pragma unroll
    for (int e = 0; e < ROWS; ++e) {
      const float row_delta = delta[row_offset<ROWS>(e)];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        score_gradient<DROPOUT>(acc_s[e][j], acc_dp[e][j], row_delta, shape);
    }
    if constexpr (HAS_DBIAS) {
      if (params.dbias) {
        ThreadBias<float>(head_dbias, m_begin + thread_y(), first_col).red_add_from(acc_s);
      }
    }
    if constexpr (SEPARATE) {
#pragma unroll
      for (int e = 0; e < ROWS; ++e) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc_s[e][j] *= derivatives[e][j];
      }
    }
    store_weights(smem, acc_s);  // dT
    multiply_add(acc_dq, smem, k.from_row(n * BLOCK_N));
  }

  // ---- write dQ ----
  const auto dq = head_matrix<T>(params.dq, params.dq_strides, tile.batch, start_q, tile.head,
                                 m_rows, shape.head_dim);
  store_output<ROWS, HEAD_DIM>(dq, acc_dq, shape.scale);
}
