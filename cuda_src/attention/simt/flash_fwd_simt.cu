// FlashAttention forward in plain CUDA, for any GPU, any strides and all three dtypes, with float32
// arithmetic throughout:
//
//   O   = softmax(score(Q K^T)) V    score.cuh has the score, FlashFwdParams the arrays
//   LSE = log(sum over keys of exp(score))
//
// This is the file to read first, here and of all kernels of attention. The folder simt computes
// what the other backends cannot take, on any GPU from Pascal on:
//   forward    flash_fwd_simt
//   backward   flash_bwd_preprocess, flash_bwd_simt, flash_bwd_postprocess_simt
//
// One block computes BLOCK_M queries of one head, and walks over the tiles of BLOCK_N keys that
// they see: 128 x 64, or 64 x 128 where O has 128 columns, so that a thread holds 8 x 8 elements of
// S and of O. Wider heads leave registers for 4 x 8 elements of S only.
//   S = Q K^T
//   online softmax         the lanes of a row exchange its maximum and its sum
//   O = O * rescale + P V  P goes through shared memory; WIDTH columns at a time. Each tile has a
//                          sum of its own, because one chain of float32 additions over the whole
//                          sequence would lose a digit
// tile.cuh has the map from threads to elements, gemm.cuh the product and how operands come to
// shared memory.
//
// Template parameters. T is the dtype of Q; HEAD_DIM is that of the accumulators, and a smaller
// head_dim is filled up with zeros; SOFTCAP, ALIBI, BIAS (a BiasKind) and DROPOUT are the options
// of the score. A warp reads only its own rows of P, and multiply_add() has the barriers for the
// other operands. No block waits for another.
//
// Source: FlashAttention-2, arXiv:2307.08691.
#include "../tile_order.cuh"
#include "gemm.cuh"
#include "score.cuh"

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, bool SOFTCAP, bool ALIBI, int BIAS,
          bool DROPOUT>
__global__ void __launch_bounds__(SIMT_THREADS, 2) flash_fwd_simt(const FlashFwdParams params) {
  constexpr BiasKind BIAS_KIND = static_cast<BiasKind>(BIAS);
  constexpr int WIDTH = HEAD_DIM < BLOCK_N ? HEAD_DIM : BLOCK_N;  // columns of O in one product
  constexpr int GROUPS = HEAD_DIM / WIDTH;
  using MapS = TileMap<BLOCK_M, BLOCK_N>;
  using MapO = TileMap<BLOCK_M, WIDTH>;
  constexpr int ROWS = MapS::ROWS;
  constexpr int COLS = MapO::COLS;
  static_assert(ROWS == MapO::ROWS, "a thread has the same rows of S and O");
  __shared__ OperandBuffers<BLOCK_M, BLOCK_N> buffers;
  __shared__ SequenceRows<const T> q, k, v;
  __shared__ struct {
    alignas(16) float max[BLOCK_M];  // in units of log2(e), like all scores
    alignas(16) float sum[BLOCK_M];
    alignas(16) float rescale[BLOCK_M];
  } rows;
  alignas(16) __shared__ float p_columns[BLOCK_N * LINE<BLOCK_M>];

  // ---- which tile ----
  const AttentionShape& shape = params.shape;
  const Tile tile = tile_of_block(blockIdx.x, ceil_div(shape.seqlen_q, BLOCK_M), shape.heads_q,
                                  shape.batch, shape.heads_per_section);
  const Sequence sequence = load_sequence(params, tile.batch);
  const int m_begin = tile.block * BLOCK_M;
  const int m_rows = min(BLOCK_M, sequence.seqlen_q - m_begin);
  if (m_rows <= 0) return;  // packed: past the end of this sequence
  const TileRange n_range = key_tiles(sequence, m_begin, m_begin + m_rows, BLOCK_N);

  if (threadIdx.x == 0) {
    q.locate(params.q, params.q_strides, tile.batch, sequence.start_q, shape);
    k.locate(params.k, params.k_strides, tile.batch, sequence.start_k, shape);
    v.locate(params.v, params.v_strides, tile.batch, sequence.start_k, shape);
  }
  const int head_kv = tile.head / (shape.heads_q / shape.heads_kv);
  const auto copies_of_qk = [&](int n) {
    return Copies{ColumnsOf<BLOCK_M, T>(q.matrix(params.q_strides, tile.head, m_begin,
                                                 sequence.seqlen_q, shape.head_dim)),
                  ColumnsOf<BLOCK_N, T>(k.matrix(params.k_strides, head_kv, n * BLOCK_N,
                                                 sequence.seqlen_k, shape.head_dim))};
  };
  const auto copies_of_v = [&](int n, int group) {
    return Copies{NoCopy{}, RowsOf<WIDTH, T>(v.matrix(params.v_strides, head_kv, n * BLOCK_N,
                                                      sequence.seqlen_k, shape.head_dim)
                                                 .from_column(group * WIDTH))};
  };
  const ScoreFunction<SOFTCAP, ALIBI> score(params, sequence, tile.batch, tile.head);
  const ScoreBias<T, BIAS_KIND> head_bias(params, sequence, tile.batch, tile.head);

  // ---- over the key tiles ----
  float acc_o[GROUPS][ROWS][COLS];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) set_zero(acc_o[g]);
  const int row = MapS::row();
  const int col = MapS::col();
  for (int i = threadIdx.x; i < BLOCK_M; i += SIMT_THREADS) {
    rows.max[i] = -INF;
    rows.sum[i] = 0.0f;
  }
  __syncthreads();  // the matrices and the first state of the rows are complete

  if (n_range.begin < n_range.end) copy_first_chunk(buffers, copies_of_qk(n_range.begin));
#pragma unroll 1
  for (int n = n_range.begin; n < n_range.end; ++n) {
    float acc_s[ROWS][MapS::COLS];
    set_zero(acc_s);
    multiply_add(
        acc_s, staged<BLOCK_M>(buffers.a, row), staged<BLOCK_N>(buffers.b, col),
        chunks_of(shape.head_dim), buffers, copies_of_qk(n), [&] { return copies_of_v(n, 0); },
        score_chains<T, HEAD_DIM>(p_columns));

    const int first_distance = n * BLOCK_N + col - (m_begin + row + sequence.diagonal);
    const ThreadScoreBias<T, BIAS_KIND> bias(head_bias, m_begin + row, n * BLOCK_N + col);
#pragma unroll
    for (int e = 0; e < ROWS; ++e) {
#pragma unroll
      for (int j = 0; j < MapS::COLS; ++j) {
        const int query = m_begin + row + offset_of(e), key = n * BLOCK_N + col + offset_of(j);
        acc_s[e][j] =
            score.log2(acc_s[e][j], first_distance + offset_of(j) - offset_of(e), query, key);
        acc_s[e][j] = bias.add_to(acc_s[e][j], offset_of(e), offset_of(j));
        acc_s[e][j] = score.masked(acc_s[e][j], query, key);
      }
    }
    if (n_range.needs_mask(n)) {
      const int columns = sequence.seqlen_k - n * BLOCK_N - col;
#pragma unroll
      for (int e = 0; e < ROWS; ++e) {
#pragma unroll
        for (int j = 0; j < MapS::COLS; ++j) {
          const int distance = first_distance + offset_of(j) - offset_of(e);
          if (!in_window(sequence, distance) || offset_of(j) >= columns) acc_s[e][j] = -INF;
        }
      }
    }
#pragma unroll
    for (int e = 0; e < ROWS; ++e) {
      const float old_max = rows.max[row + offset_of(e)];
      float new_max = old_max;
#pragma unroll
      for (int j = 0; j < MapS::COLS; ++j) new_max = fmaxf(new_max, acc_s[e][j]);
      new_max = MapS::reduce_row(new_max, [](float x, float y) { return fmaxf(x, y); });
      // A row that has seen no key yet would have -inf - (-inf), which is NaN.
      const float offset = new_max == -INF ? 0.0f : new_max;
      const float rescale = exp2_approx(old_max - offset);
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < MapS::COLS; ++j) {
        acc_s[e][j] = exp2_approx(acc_s[e][j] - offset);
        sum += acc_s[e][j];
      }
      sum = MapS::reduce_row(sum, [](float x, float y) { return x + y; });
      __syncwarp();  // all lanes of the row have read the old maximum
      if (col == 0) {
        rows.max[row + offset_of(e)] = new_max;
        rows.sum[row + offset_of(e)] = rows.sum[row + offset_of(e)] * rescale + sum;
        rows.rescale[row + offset_of(e)] = rescale;
      }
    }
    if constexpr (DROPOUT) {
      const SimtDropout dropout(params, tile.batch, tile.head);
      dropout.mark(acc_s, m_begin + row, n * BLOCK_N + col);
#pragma unroll
      for (int e = 0; e < ROWS; ++e) {
#pragma unroll
        for (int j = 0; j < MapS::COLS; ++j)
          acc_s[e][j] = is_kept(acc_s[e][j]) ? acc_s[e][j] : 0.0f;
      }
    }
    store_columns_of<BLOCK_M, BLOCK_N>(p_columns, acc_s);
    __syncwarp();  // the warp's rows of P are complete

    const int chunks = chunks_of(min(BLOCK_N, sequence.seqlen_k - n * BLOCK_N));
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      float sum[ROWS][COLS];
      set_zero(sum);
      const ResidentLines<BLOCK_M, BLOCK_N> lines_p(p_columns, row);
      const auto lines_v = staged<WIDTH>(buffers.b, MapO::col());
      if (g + 1 < GROUPS) {
        multiply_add(sum, lines_p, lines_v, chunks, buffers, copies_of_v(n, g),
                     [&] { return copies_of_v(n, g + 1); });
      } else {
        multiply_add(sum, lines_p, lines_v, chunks, buffers, copies_of_v(n, g),
                     [&] { return copies_of_qk(min(n + 1, n_range.end - 1)); });
      }
#pragma unroll
      for (int e = 0; e < ROWS; ++e) {
#pragma unroll
        for (int c = 0; c < COLS; ++c)
          acc_o[g][e][c] = acc_o[g][e][c] * rows.rescale[row + offset_of(e)] + sum[e][c];
      }
    }
  }

  // ---- normalise, write O and LSE ----
  const float sink_log2 = params.sinks ? params.sinks[tile.head] * LOG2E : -INF;
  float* lse = params.lse + tile.batch * params.lse_batch_stride +
               tile.head * params.lse_head_stride + sequence.start_q + m_begin + row;
  T* out = static_cast<T*>(params.out) +
           params.out_strides.at(tile.batch, sequence.start_q + m_begin + row, tile.head);
#pragma unroll
  for (int e = 0; e < ROWS; ++e) {
    if (row + offset_of(e) >= m_rows) continue;
    // The sink is one more score, with a value vector of zeros.
    const float row_max = rows.max[row + offset_of(e)];
    const float max = fmaxf(row_max, sink_log2);
    const float offset = max == -INF ? 0.0f : max;
    const float rescale = exp2_approx(row_max - offset);
    const float sum = rows.sum[row + offset_of(e)] * rescale + exp2_approx(sink_log2 - offset);
    float inverse = sum == 0.0f ? 0.0f : rescale / sum;  // the sum is 0 if the row sees no key
    if constexpr (DROPOUT) inverse *= shape.dropout_scale;
    if (params.lse && col == 0) lse[offset_of(e)] = sum == 0.0f ? -INF : max * LN2 + logf(sum);
    T* out_row = out + offset_of(e) * params.out_strides.row;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        const int column = WIDTH * g + MapO::col() + offset_of(c);
        if (column < shape.head_dim) out_row[column] = from_float<T>(acc_o[g][e][c] * inverse);
      }
    }
  }
}
