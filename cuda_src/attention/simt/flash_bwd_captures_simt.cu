// The gradients of the captures of a text in plain CUDA, behind the other kernels of a backward
// pass, for any GPU, any strides, any head_dim and all three dtypes. It computes dS once more, as
// flash_bwd_simt does, and adds
//   dS * (derivative of the score by what was read)    to the gradient of each element that was
//   read
// as flash_bwd_captures_sm80.cu does. A block owns BLOCK_N keys of one key head and walks over the
// tiles of BLOCK_M queries that see them, of every query head of the group.
//
// Template parameters. T is the dtype of Q; BIAS (a BiasKind) and DROPOUT are the options of the
// score beside the text.
#include "../text/reads.cuh"
#include "bwd_block.cuh"
#include "gemm.cuh"
#include "score.cuh"

template <typename T, int BLOCK_M, int BLOCK_N, int BIAS, bool DROPOUT>
__global__ void __launch_bounds__(SIMT_THREADS, 2)
    flash_bwd_captures_simt(const __grid_constant__ FlashBwdParams params) {
  constexpr BiasKind BIAS_KIND = static_cast<BiasKind>(BIAS);
  using MapS = TileMap<BLOCK_M, BLOCK_N>;
  constexpr int ROWS = MapS::ROWS;
  constexpr int COLS = MapS::COLS;
  constexpr int HEAD_DIM = 256;  // any: narrow heads have a single chain, as elsewhere

  __shared__ SimtBwdBlock<T> block;
  __shared__ OperandBuffers<BLOCK_M, BLOCK_N> buffers;
  __shared__ float waiting[ROWS * COLS * SIMT_THREADS];

  // ---- which tile ----
  const AttentionShape& shape = params.shape;
  if (threadIdx.x == 0) block.locate(params, BLOCK_M, BLOCK_N);
  __syncthreads();                // the tile is located
  if (block.n_rows <= 0) return;  // packed: past the end of this sequence

  const auto rows_of_queries = [&](const SequenceRows<const T>& x, const Strides& strides, int head,
                                   int m) {
    return ColumnsOf<BLOCK_M, T>(
        x.matrix(strides, head, m * BLOCK_M, block.sequence.seqlen_q, shape.head_dim));
  };
  const auto rows_of_keys = [&](const SequenceRows<const T>& x, const Strides& strides) {
    const int n_begin = block.n_block * BLOCK_N;
    return ColumnsOf<BLOCK_N, T>(
        x.matrix(strides, block.head_kv, n_begin, n_begin + block.n_rows, shape.head_dim));
  };
  const auto copies_for_s = [&](int head, int m) {
    return Copies{rows_of_queries(block.q, params.q_strides, head, m),
                  rows_of_keys(block.k, params.k_strides)};
  };
  const auto copies_for_dp = [&](int head, int m) {
    return Copies{rows_of_queries(block.dout, params.dout_strides, head, m),
                  rows_of_keys(block.v, params.v_strides)};
  };
  const Captures captures = params;  // with the state of an evaluation
  ReadSums sums;

  // ---- over the query heads of the group and their query tiles ----
  const int group_size = shape.heads_q / shape.heads_kv;
  const int head_end = (block.head_kv + 1) * group_size;
  const int chunks = chunks_of(shape.head_dim);
  int head = block.m_range.begin < block.m_range.end ? block.head_kv * group_size : head_end;
  int m = block.m_range.begin;
  if (head < head_end) copy_first_chunk(buffers, copies_for_s(head, m));
#pragma unroll 1
  while (head < head_end) {
    const bool last_m = m + 1 == block.m_range.end;
    const int next_head = last_m ? head + 1 : head;
    const int next_m = last_m ? block.m_range.begin : m + 1;

    // ---- S = Q K^T, dP = dO V^T ----
    const auto lines_q = staged<BLOCK_M>(buffers.a, MapS::row());
    const auto lines_k = staged<BLOCK_N>(buffers.b, MapS::col());
    float acc_s[ROWS][COLS], acc_dp[ROWS][COLS];
    set_zero(acc_s);
    set_zero(acc_dp);
    multiply_add(
        acc_s, lines_q, lines_k, chunks, buffers, copies_for_s(head, m),
        [&] { return copies_for_dp(head, m); }, score_chains<T, HEAD_DIM>(waiting));
    multiply_add(acc_dp, lines_q, lines_k, chunks, buffers, copies_for_dp(head, m),
                 [&] { return copies_for_s(min(next_head, head_end - 1), next_m); });

    // ---- P ----
    const int row = m * BLOCK_M + MapS::row();
    const int col = block.n_block * BLOCK_N + MapS::col();
    const int64_t accum_row =
        head * params.accum_rows + block.sequence.accum_start + m * BLOCK_M + MapS::row();
    const ScoreFunction<false, false> score(params, captures, block.sequence, block.batch, head);
    const ThreadScoreBias<T, BIAS_KIND> bias(
        ScoreBias<T, BIAS_KIND>(params, block.sequence, block.batch, head), row, col);
    const bool masked = block.m_range.needs_mask(m) || block.n_rows < BLOCK_N;
    const int first_distance = col - (row + block.sequence.diagonal);
    float lse_log2[ROWS];  // +inf past the end
    load_fours<8>(lse_log2, params.lse_log2 + accum_row);
    float ds[ROWS][COLS];
#pragma unroll
    for (int e = 0; e < ROWS; ++e) {
#pragma unroll
      for (int j = 0; j < COLS; ++j) {
        const int query = row + offset_of(e), key = col + offset_of(j);
        const int distance = first_distance + offset_of(j) - offset_of(e);
        text::start_reads(captures);
        float s = score.log2(acc_s[e][j], distance, query, key);
        s = score.masked(bias.add_to(s, offset_of(e), offset_of(j)), query, key);
        const bool seen =
            !masked || (in_window(block.sequence, distance) && key < block.sequence.seqlen_k);
        ds[e][j] = seen ? exp2_approx(s - lse_log2[e]) : 0.0f;
      }
    }
    if constexpr (DROPOUT) SimtDropout(params, block.batch, head).mark(ds, row, col);

    // ---- dS, and what each score has read ----
    float delta[ROWS];
    load_fours<8>(delta, params.delta + accum_row);
#pragma unroll
    for (int e = 0; e < ROWS; ++e) {
#pragma unroll
      for (int j = 0; j < COLS; ++j) {
        score_gradient<DROPOUT>(ds[e][j], acc_dp[e][j], delta[e], shape);
        sums.add(ds[e][j], score.inner * acc_s[e][j], block.batch, head,
                 min(row + offset_of(e), score.last_query), min(col + offset_of(j), score.last_key),
                 captures);
      }
    }
    head = next_head;
    m = next_m;
  }
  sums.flush();
}
