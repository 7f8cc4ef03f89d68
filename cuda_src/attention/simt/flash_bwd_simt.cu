// FlashAttention backward in plain CUDA, for any GPU, any strides and all three dtypes, with
// float32 arithmetic throughout:
//
//   P  = exp2(S - lse_log2)            S = score(Q K^T), recomputed; score.cuh
//   dS = P * (dP - delta)              dP = dO V^T
//   dV += P^T dO    dK += dT^T Q       dT = dS times the derivative of the softcap
//   dQ += dT K                         in global memory (dq_accum, float32), since every key tile
//                                      contributes
//
// FlashBwdParams has the arrays with their shapes. flash_bwd_preprocess.cu comes before this kernel
// and flash_bwd_postprocess_simt.cu after it. One block owns BLOCK_N keys of one key head, and
// walks over the tiles of BLOCK_M queries that see them, of every query head of the group. With a
// bias it also adds dS to the gradient of the bias. Dropout sets P in dV, and dP, to 0 where it
// drops a weight, and scales them elsewhere.
//
// P, and later dT, go through one tile in shared memory, by queries for dV and dK, by keys for dQ.
// Every product of a tile of queries has a sum of its own, because one chain of float32 additions
// over the whole sequence would lose a digit. tile.cuh has the map from threads to elements,
// gemm.cuh the product and how operands come to shared memory.
//
// Template parameters. T is the dtype of Q; HEAD_DIM is that of the accumulators, and a smaller
// head_dim is filled up with zeros; SOFTCAP, ALIBI, BIAS (a BiasKind) and DROPOUT are the options
// of the score.
//
// Why it ends. For a deterministic sum (dq_semaphore) the blocks add to a query tile in the order
// of their keys, so blocks wait for each other. A block takes its tile by ticket, so it waits only
// for blocks that run already, and the earliest of them waits for none.
#include "bwd_block.cuh"
#include "gemm.cuh"
#include "score.cuh"

template <typename T, int HEAD_DIM, int BLOCK_N, bool SOFTCAP, bool ALIBI, int BIAS, bool DROPOUT>
__global__ void __launch_bounds__(SIMT_THREADS, 2) flash_bwd_simt(const FlashBwdParams params) {
  constexpr BiasKind BIAS_KIND = static_cast<BiasKind>(BIAS);
  constexpr int BLOCK_M = HEAD_DIM > 128 ? 64 : 128;
  using MapS = TileMap<BLOCK_M, BLOCK_N>;
  constexpr int ROWS = MapS::ROWS;
  constexpr int COLS = MapS::COLS;
  // dK and dV are computed as tiles of columns x keys, or keys x columns if there are few columns.
  constexpr bool BY_KEYS = HEAD_DIM < 64;
  constexpr int WIDEST = HEAD_DIM > 128 ? 64 : 128;  // wide heads leave fewer registers
  constexpr int WIDTH = HEAD_DIM < WIDEST ? HEAD_DIM : WIDEST;
  constexpr int GROUPS = HEAD_DIM / WIDTH;
  using MapKV = TileMap<BY_KEYS ? BLOCK_N : WIDTH, BY_KEYS ? HEAD_DIM : BLOCK_N>;
  // dQ is computed as tiles of queries x columns; wide heads leave registers for 32 columns.
  constexpr int WIDTH_Q = HEAD_DIM == 64 || HEAD_DIM == 128 ? 64 : 32;
  constexpr int GROUPS_Q = HEAD_DIM / WIDTH_Q;
  using MapQ = TileMap<BLOCK_M, WIDTH_Q>;
  static_assert(ACCUM_ROW_ALIGN % BLOCK_M == 0, "a query tile must not straddle two sequences");
  // The gradient of the bias is dS and not dT, so with a softcap or a text the kernel needs both.
  constexpr bool HAS_DBIAS = has_gradient(BIAS_KIND);
  constexpr bool HAS_SLOPE = SOFTCAP || HAS_USER_SCORE;
  constexpr bool SEPARATE = HAS_DBIAS && HAS_SLOPE;

  __shared__ SimtBwdBlock<T> block;
  __shared__ OperandBuffers<128, 64> buffers;
  constexpr int BY_QUERY = BLOCK_M * LINE<BLOCK_N>, BY_KEY = BLOCK_N * LINE<BLOCK_M>;
  alignas(16) __shared__ float weights[BY_QUERY > BY_KEY ? BY_QUERY : BY_KEY];

  // P * dS/dT waits for dP in registers, or here where wide heads leave none; so do derivatives.
  // Each element is its thread's own.
  constexpr bool KEPT = HAS_SLOPE || DROPOUT;  // otherwise it is P, which lies in `weights`
  constexpr bool PARKED = KEPT && HEAD_DIM > 128;
  __shared__ float parked[PARKED ? ROWS * COLS : 1][PARKED ? SIMT_THREADS : 1];
  __shared__ float derivatives[SEPARATE ? ROWS * COLS : 1][SEPARATE ? SIMT_THREADS : 1];

  // ---- which tile ----
  const AttentionShape& shape = params.shape;
  if (threadIdx.x == 0) block.locate(params, BLOCK_M, BLOCK_N);
  __syncthreads();                // the tile is located
  if (block.n_rows <= 0) return;  // packed: past the end of this sequence

  const auto rows_of_queries = [&](const SequenceRows<const T>& x, const Strides& strides, int head,
                                   int m) {
    return x.matrix(strides, head, m * BLOCK_M, block.sequence.seqlen_q, shape.head_dim);
  };
  const auto rows_of_keys = [&](const SequenceRows<const T>& x, const Strides& strides) {
    const int n_begin = block.n_block * BLOCK_N;
    return x.matrix(strides, block.head_kv, n_begin, n_begin + block.n_rows, shape.head_dim);
  };
  const auto copies_for_s = [&](int head, int m) {
    return Copies{ColumnsOf<BLOCK_M, T>(rows_of_queries(block.q, params.q_strides, head, m)),
                  ColumnsOf<BLOCK_N, T>(rows_of_keys(block.k, params.k_strides))};
  };
  const auto copies_for_dp = [&](int head, int m) {
    return Copies{ColumnsOf<BLOCK_M, T>(rows_of_queries(block.dout, params.dout_strides, head, m)),
                  ColumnsOf<BLOCK_N, T>(rows_of_keys(block.v, params.v_strides))};
  };
  const auto copies_for_keys = [&](const SequenceRows<const T>& x, const Strides& strides, int head,
                                   int m, int group) {
    const RowsOf<WIDTH, T> rows(rows_of_queries(x, strides, head, m).from_column(group * WIDTH));
    if constexpr (BY_KEYS) {
      return Copies{NoCopy{}, rows};
    } else {
      return Copies{rows, NoCopy{}};
    }
  };
  const auto copies_for_dv = [&](int head, int m, int group) {
    return copies_for_keys(block.dout, params.dout_strides, head, m, group);
  };
  const auto copies_for_dk = [&](int head, int m, int group) {
    return copies_for_keys(block.q, params.q_strides, head, m, group);
  };
  const auto copies_for_dq = [&](int group) {
    return Copies{
        NoCopy{},
        RowsOf<WIDTH_Q, T>(rows_of_keys(block.k, params.k_strides).from_column(group * WIDTH_Q))};
  };
  // acc += W^T B, where W lies in `weights` by queries
  const auto multiply_weights = [&](auto& acc, int chunks, const auto& copies, auto next) {
    float sum[MapKV::ROWS][MapKV::COLS];
    set_zero(sum);
    if constexpr (BY_KEYS) {
      multiply_add(sum, ResidentLines<BLOCK_N, BLOCK_M>(weights, MapKV::row()),
                   staged<WIDTH>(buffers.b, MapKV::col()), chunks, buffers, copies, next);
    } else {
      multiply_add(sum, staged<WIDTH>(buffers.a, MapKV::row()),
                   ResidentLines<BLOCK_N, BLOCK_M>(weights, MapKV::col()), chunks, buffers, copies,
                   next);
    }
    add(acc, sum);
  };

  // ---- over the query heads of the group and their query tiles ----
  float acc_dk[GROUPS][MapKV::ROWS][MapKV::COLS];
  float acc_dv[GROUPS][MapKV::ROWS][MapKV::COLS];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    set_zero(acc_dk[g]);
    set_zero(acc_dv[g]);
  }
  const int group_size = shape.heads_q / shape.heads_kv;
  const int head_end = (block.head_kv + 1) * group_size;
  int head = block.m_range.begin < block.m_range.end ? block.head_kv * group_size : head_end;
  int m = block.m_range.begin;
  if (head < head_end) copy_first_chunk(buffers, copies_for_s(head, m));
#pragma unroll 1
  while (head < head_end) {
    const int row = m * BLOCK_M + MapS::row();
    const int col = block.n_block * BLOCK_N + MapS::col();
    const int64_t accum_row = head * params.accum_rows + block.sequence.accum_start + m * BLOCK_M;
    const int chunks_d = chunks_of(shape.head_dim);
    const int chunks_m = chunks_of(min(BLOCK_M, block.sequence.seqlen_q - m * BLOCK_M));

    // ---- S = Q K^T, score, P ----
    float acc_s[ROWS][COLS];
    set_zero(acc_s);
    multiply_add(
        acc_s, staged<BLOCK_M>(buffers.a, MapS::row()), staged<BLOCK_N>(buffers.b, MapS::col()),
        chunks_d, buffers, copies_for_s(head, m), [&] { return copies_for_dv(head, m, 0); },
        score_chains<T, HEAD_DIM>(weights));
    {
      const ScoreFunction<SOFTCAP, ALIBI> score(params, block.sequence, block.batch, head);
      const ThreadScoreBias<T, BIAS_KIND> bias(
          ScoreBias<T, BIAS_KIND>(params, block.sequence, block.batch, head), row, col);
      // The scores of keys past the end must be masked: no log-sum-exp includes them, so their exp2
      // could overflow.
      const bool masked = block.m_range.needs_mask(m) || block.n_rows < BLOCK_N;
      const int first_distance = col - (row + block.sequence.diagonal);
      const int columns = block.sequence.seqlen_k - col;
      float lse_log2[ROWS];  // +inf past the end
      load_fours<8>(lse_log2, params.lse_log2 + accum_row + MapS::row());
      float p[ROWS][COLS];  // for dV, while acc_s becomes P * dS/dT
#pragma unroll
      for (int e = 0; e < ROWS; ++e) {
#pragma unroll
        for (int j = 0; j < COLS; ++j) {
          const int distance = first_distance + offset_of(j) - offset_of(e);
          float derivative;
          const int query = row + offset_of(e), key = col + offset_of(j);
          float s = score.log2(acc_s[e][j], distance, query, key, derivative);
          s = score.masked(bias.add_to(s, offset_of(e), offset_of(j)), query, key);
          const bool seen =
              !masked || (in_window(block.sequence, distance) && offset_of(j) < columns);
          p[e][j] = seen ? exp2_approx(s - lse_log2[e]) : 0.0f;
          acc_s[e][j] = SEPARATE ? p[e][j] : p[e][j] * derivative;
          if constexpr (SEPARATE) derivatives[e * COLS + j][threadIdx.x] = derivative;
        }
      }
      if constexpr (DROPOUT) {
        const SimtDropout dropout(params, block.batch, head);
        dropout.mark(acc_s, row, col);
#pragma unroll
        for (int e = 0; e < ROWS; ++e) {
#pragma unroll
          for (int j = 0; j < COLS; ++j)
            p[e][j] = is_kept(acc_s[e][j]) ? p[e][j] * shape.dropout_scale : 0.0f;
        }
      }
      store_rows_of<BLOCK_M, BLOCK_N>(weights, p);
      if constexpr (PARKED) {
#pragma unroll
        for (int i = 0; i < ROWS * COLS; ++i) parked[i][threadIdx.x] = acc_s[i / COLS][i % COLS];
      }
    }
    __syncthreads();  // P is complete

    // ---- dV += P^T dO ----
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      if (g + 1 < GROUPS) {
        multiply_weights(acc_dv[g], chunks_m, copies_for_dv(head, m, g),
                         [&] { return copies_for_dv(head, m, g + 1); });
      } else {
        multiply_weights(acc_dv[g], chunks_m, copies_for_dv(head, m, g),
                         [&] { return copies_for_dp(head, m); });
      }
    }

    // ---- dP = dO V^T, dS, dT ----
    float acc_dp[ROWS][COLS];
    set_zero(acc_dp);
    multiply_add(acc_dp, staged<BLOCK_M>(buffers.a, MapS::row()),
                 staged<BLOCK_N>(buffers.b, MapS::col()), chunks_d, buffers, copies_for_dp(head, m),
                 [&] { return copies_for_dk(head, m, 0); });
    if constexpr (!KEPT) {
      load_rows_of<BLOCK_M, BLOCK_N>(acc_s, weights);
    } else if constexpr (PARKED) {
#pragma unroll
      for (int i = 0; i < ROWS * COLS; ++i) acc_s[i / COLS][i % COLS] = parked[i][threadIdx.x];
    }
    {
      float delta[ROWS];
      load_fours<8>(delta, params.delta + accum_row + MapS::row());
#pragma unroll
      for (int e = 0; e < ROWS; ++e) {
#pragma unroll
        for (int j = 0; j < COLS; ++j)
          score_gradient<DROPOUT>(acc_s[e][j], acc_dp[e][j], delta[e], shape);
      }
      if constexpr (HAS_DBIAS) {
        if (params.dbias) {
          const BiasHead<float> dbias(params.dbias, params.dbias_strides, block.sequence,
                                      block.batch, head);
          ThreadBias<float>(dbias, row, col).red_add_from(acc_s);
        }
      }
      if constexpr (SEPARATE) {
#pragma unroll
        for (int e = 0; e < ROWS; ++e) {
#pragma unroll
          for (int j = 0; j < COLS; ++j) acc_s[e][j] *= derivatives[e * COLS + j][threadIdx.x];
        }
      }
    }
    store_rows_of<BLOCK_M, BLOCK_N>(weights, acc_s);
    __syncthreads();  // dT is complete

    // ---- dK += dT^T Q ----
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      if (g + 1 < GROUPS) {
        multiply_weights(acc_dk[g], chunks_m, copies_for_dk(head, m, g),
                         [&] { return copies_for_dk(head, m, g + 1); });
      } else {
        multiply_weights(acc_dk[g], chunks_m, copies_for_dk(head, m, g),
                         [&] { return copies_for_dq(0); });
      }
    }

    // ---- dQ += dT K ----
    load_rows_of<BLOCK_M, BLOCK_N>(acc_s, weights);
    __syncthreads();  // all threads have read dT by queries
    store_columns_of<BLOCK_M, BLOCK_N>(weights, acc_s);
    __syncthreads();  // dT by keys is complete

    const bool last_m = m + 1 == block.m_range.end;
    const int next_head = last_m ? head + 1 : head;
    const int next_m = last_m ? block.m_range.begin : m + 1;
    // The flag counts the key tiles that have added to this query tile. Element 0 is the ticket
    // counter.
    int* turn = params.dq_semaphore ? params.dq_semaphore + 1 + accum_row / BLOCK_M : nullptr;
#pragma unroll 1
    for (int g = 0; g < GROUPS_Q; ++g) {
      float sum[MapQ::ROWS][MapQ::COLS];
      set_zero(sum);
      const ResidentLines<BLOCK_M, BLOCK_N> lines_dt(weights, MapQ::row());
      const auto lines_k = staged<WIDTH_Q>(buffers.b, MapQ::col());
      const int chunks = chunks_of(block.n_rows);
      if (g + 1 < GROUPS_Q) {
        multiply_add(sum, lines_dt, lines_k, chunks, buffers, copies_for_dq(g),
                     [&] { return copies_for_dq(g + 1); });
      } else {
        multiply_add(sum, lines_dt, lines_k, chunks, buffers, copies_for_dq(g),
                     [&] { return copies_for_s(min(next_head, head_end - 1), next_m); });
      }
      if (g == 0 && turn) {
        if (threadIdx.x == 0) {
          const int number = turn_of_block(block, m, BLOCK_M, BLOCK_N);
          // GPUs older than sm_70 have neither .acquire nor .release.
          while (*static_cast<volatile int*>(turn) != number) {
          }
          __threadfence();
        }
        __syncthreads();  // it is this block's turn
      }
      float* dq =
          params.dq_accum + (accum_row + MapQ::row()) * HEAD_DIM + g * WIDTH_Q + MapQ::col();
#pragma unroll
      for (int e = 0; e < MapQ::ROWS; ++e) {
#pragma unroll
        for (int c = 0; c < MapQ::COLS; c += 4) {
          const float scaled[4] = {sum[e][c] * shape.scale, sum[e][c + 1] * shape.scale,
                                   sum[e][c + 2] * shape.scale, sum[e][c + 3] * shape.scale};
          red_add_four(dq + offset_of(e) * HEAD_DIM + offset_of(c), scaled);
        }
      }
    }
    if (turn) {
      __syncthreads();  // all threads have added
      if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(turn, 1);
      }
    }
    head = next_head;
    m = next_m;
  }

  // ---- write dK and dV ----
  const auto write = [&](void* tensor, const Strides& strides, const auto& acc, float factor) {
    T* first =
        static_cast<T*>(tensor) +
        strides.at(block.batch, block.sequence.start_k + block.n_block * BLOCK_N, block.head_kv);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
      for (int j = 0; j < MapKV::COLS; ++j) {
#pragma unroll
        for (int e = 0; e < MapKV::ROWS; ++e) {
          const int r = MapKV::row() + offset_of(e), c = MapKV::col() + offset_of(j);
          const int key = BY_KEYS ? r : c, column = g * WIDTH + (BY_KEYS ? c : r);
          if (key < block.n_rows && column < shape.head_dim)
            first[key * strides.row + column] = from_float<T>(acc[g][e][j] * factor);
        }
      }
    }
  };
  write(params.dk, params.dk_strides, acc_dk, shape.scale);
  write(params.dv, params.dv_strides, acc_dv, 1.0f);
}
