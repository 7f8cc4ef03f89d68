// FlashAttention forward in plain CUDA, for any GPU, any strides and all three dtypes, with float32
// arithmetic throughout:
//
//   O   = softmax(score(Q K^T)) V    simt_score.cuh has the score, FlashFwdParams the arrays
//   LSE = log(sum over keys of exp(score))
//
// One block computes BLOCK_M queries (64, or 32 where registers are short) of one head, and walks
// over the tiles of 64 keys that they see. With 64 queries its steps are
//   S = Q K^T              multiply_transposed: 64 x 64 scores, 8 x 4 a thread
//   online softmax         the 16 lanes of a row exchange its maximum; the sum stays a partial sum
//                          of the thread until the end
//   O = O * rescale + P V  multiply_add: P goes through shared memory, 8 x HEAD_DIM / 16 a thread
// simt_tile.cuh has the map from threads to elements and the plan of shared memory.
//
// Template parameters. T is the dtype of Q; HEAD_DIM is that of the accumulators, and a smaller
// head_dim is filled up with zeros; SOFTCAP, ALIBI, BIAS (a BiasKind) and DROPOUT are the options
// of the score. Each product has a __syncthreads() before it overwrites its operands in shared
// memory, and one before it reads them. No block waits for another.
//
// Source: FlashAttention-2, arXiv:2307.08691.
#include "simt_gemm.cuh"
#include "simt_score.cuh"
#include "tile_order.cuh"

template <typename T, int HEAD_DIM, int BLOCK_M, bool SOFTCAP, bool ALIBI, int BIAS, bool DROPOUT>
__global__ void __launch_bounds__(SIMT_THREADS, HEAD_DIM <= 64 && BIAS == 0 && !DROPOUT ? 3 : 2)
    flash_fwd_simt(const FlashFwdParams params) {
  constexpr BiasKind BIAS_KIND = static_cast<BiasKind>(BIAS);
  constexpr int ROWS = BLOCK_M / 8;
  constexpr int BLOCK_N = SCORE_COLUMNS;
  constexpr int COLUMNS = HEAD_DIM / 16;
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

  const int head_kv = tile.head / (shape.heads_q / shape.heads_kv);
  const auto q =
      head_matrix<const T>(params.q, params.q_strides, tile.batch, sequence.start_q + m_begin,
                           tile.head, m_rows, shape.head_dim);
  const auto k = head_matrix<const T>(params.k, params.k_strides, tile.batch, sequence.start_k,
                                      head_kv, sequence.seqlen_k, shape.head_dim);
  const auto v = head_matrix<const T>(params.v, params.v_strides, tile.batch, sequence.start_k,
                                      head_kv, sequence.seqlen_k, shape.head_dim);
  const ScoreFunction<SOFTCAP, ALIBI> score(shape, params.alibi_slopes, params.alibi_batch_stride,
                                            tile.batch, tile.head);
  using Bias = const BiasElement<T, BIAS_KIND>;
  const BiasHead<Bias> head_bias(static_cast<Bias*>(params.bias), params.bias_strides, sequence,
                                 tile.batch, tile.head);

  // ---- over the key tiles ----
  float acc_o[ROWS][COLUMNS] = {};
  float row_max[ROWS];  // in units of log2(e), like all scores
  float row_sum[ROWS] = {};
#pragma unroll
  for (int e = 0; e < ROWS; ++e) row_max[e] = -INF;

#pragma unroll 1
  for (int n = n_range.begin; n < n_range.end; ++n) {
    float acc_s[ROWS][4];
    multiply_transposed(acc_s, smem, q, k.from_row(n * BLOCK_N));

    const bool masked = n_range.needs_mask(n);
    const int first_col = n * BLOCK_N + thread_x();
    const int first_distance = first_col - (m_begin + thread_y() + sequence.diagonal);
    const int columns = sequence.seqlen_k - first_col;
    const ThreadBias<Bias> bias(head_bias, m_begin + thread_y(), first_col);
#pragma unroll
    for (int e = 0; e < ROWS; ++e) {
      float new_max = row_max[e];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int distance = first_distance + column_offset(j) - row_offset<ROWS>(e);
        acc_s[e][j] = score.log2(acc_s[e][j], distance);
        if constexpr (BIAS_KIND != BiasKind::NONE)
          acc_s[e][j] = bias.add_to(acc_s[e][j], row_offset<ROWS>(e), column_offset(j));
        if (masked && !(in_window(sequence, distance) && column_offset(j) < columns))
          acc_s[e][j] = -INF;
        new_max = fmaxf(new_max, acc_s[e][j]);
      }
      new_max = reduce_row(new_max, [](float x, float y) { return fmaxf(x, y); });
      // For a row that has seen no key yet, -inf - (-inf) would be NaN.
      const float offset = new_max == -INF ? 0.0f : new_max;
      const float rescale = exp2_approx(row_max[e] - offset);
      row_max[e] = new_max;
      row_sum[e] *= rescale;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        acc_s[e][j] = exp2_approx(acc_s[e][j] - offset);
        row_sum[e] += acc_s[e][j];
      }
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) acc_o[e][c] *= rescale;
    }
    if constexpr (DROPOUT) {
      const SimtDropout dropout(params.dropout_seed, shape, tile.batch, tile.head);
      dropout.mark<false>(acc_s, m_begin + thread_y(), first_col);
#pragma unroll
      for (int e = 0; e < ROWS; ++e) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc_s[e][j] = is_kept(acc_s[e][j]) ? acc_s[e][j] : 0.0f;
      }
    }
    store_weights(smem, acc_s);
    multiply_add(acc_o, smem, v.from_row(n * BLOCK_N));
  }

  // ---- normalise, write O and LSE ----
  const float sink_log2 = params.sinks ? params.sinks[tile.head] * LOG2E : -INF;
  float* lse = params.lse + tile.batch * params.lse_batch_stride +
               tile.head * params.lse_head_stride + sequence.start_q + m_begin + thread_y();
#pragma unroll
  for (int e = 0; e < ROWS; ++e) {
    // The sink is one more score, with a value vector of zeros.
    const float max = fmaxf(row_max[e], sink_log2);
    const float offset = max == -INF ? 0.0f : max;
    const float rescale = exp2_approx(row_max[e] - offset);
    const float keys_sum = reduce_row(row_sum[e], [](float x, float y) { return x + y; });
    const float sum = keys_sum * rescale + exp2_approx(sink_log2 - offset);
    float inverse = sum == 0.0f ? 0.0f : rescale / sum;  // the sum is 0 if the row sees no key
    if constexpr (DROPOUT) inverse *= shape.dropout_scale;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) acc_o[e][c] *= inverse;
    const int row = row_offset<ROWS>(e);
    if (params.lse && thread_x() == 0 && row < m_rows - thread_y())
      lse[row] = sum == 0.0f ? -INF : max * LN2 + logf(sum);
  }
  const auto out = head_matrix<T>(params.out, params.out_strides, tile.batch,
                                  sequence.start_q + m_begin, tile.head, m_rows, shape.head_dim);
  store_output<ROWS, HEAD_DIM>(out, acc_o, 1.0f);
}
