// Backward of sequences that fit one tile, on mma.sync (sm_80 and newer), for float16 and bfloat16
// and scores without options or with a bias:
//
//   P  = exp2(scale_log2 * S - lse_log2)   S = score(Q K^T), recomputed; score.cuh
//   dS = P * (dP - delta)                  dP = dO V^T; score_gradient.cuh
//   dQ = scale * dS K    dK = scale * dS^T Q    dV = P^T dO    dbias += dS
//
// FlashBwdParams has the arrays with their shapes; every query head has a key head of its own. This
// kernel is the whole backward pass: no other block adds to dQ, dK and dV, so it needs none of the
// accumulators, and it computes delta and lse_log2 itself.
//
// A block belongs to a head and takes every n-th sequence of the batch, one tile each. All warps do
// the same, with the warp tiles of WarpGrid, as in flash_bwd_sm80.cu. Shared memory holds K, V, Q
// and dO, and a pool for P and dS, through which the results are written afterwards, too. While a
// block waits for its copies, others on the multiprocessor compute.
//
// A bias that the whole batch shares is read once a block and kept in shared memory. Its gradient
// is summed in registers and added to global memory once a block; otherwise every sequence would
// add to the same few elements.
//
// Template parameters. T is the dtype of Q; HEAD_DIM is that of the tiles, and a smaller head_dim
// is filled up with zeros; BLOCK is the number of queries and of keys of a tile; ARCH is the
// compute capability; BIAS is a BiasKind; SMEM_BYTES is the dynamic shared memory.
//
// Why nothing is overwritten too early. A __syncthreads() lies between the writes and the reads of
// each buffer, and between its reads and the next writes: the inputs are copied anew after the last
// product, and the pool is written after its last reader has passed the barrier at which the copies
// have landed. No block waits for another, so the kernel ends.
//
// Source: FlashAttention-2, arXiv:2307.08691, algorithm 2.
#include "../../common/pack.cuh"
#include "../block_info.cuh"
#include "../params.cuh"
#include "../row_constants.cuh"
#include "../score_gradient.cuh"
#include "../warp_gemm.cuh"
#include "bwd_warps.cuh"

// A thread's chunks of a row of O, and the LSE of the row with its gradient, which are loaded
// ahead.
template <typename T, int CHUNKS>
struct RowPart {
  Pack<T, 8> out[CHUNKS];
  float lse = -INF;
  float dlse = 0.f;
};

template <int M, int N>
__device__ __forceinline__ void scale_by(float (&acc)[M][N][4], float factor) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] *= factor;
    }
  }
}

// Blocks that a multiprocessor should have registers for, 0 where ptxas chooses: a block of wide
// heads waits too much when it is alone, but for Blackwell NVRTC 13.0 would spill for two.
template <int HEAD_DIM>
constexpr int MIN_BLOCKS = HEAD_DIM <= 64          ? 0
                           : __CUDA_ARCH__ == 900  ? 2
                           : __CUDA_ARCH__ >= 1000 ? 1
                                                   : 0;

template <typename T, int HEAD_DIM, int BLOCK, int NUM_WARPS, int ARCH, int BIAS, int SMEM_BYTES>
__global__ void __launch_bounds__(NUM_WARPS * 32, MIN_BLOCKS<HEAD_DIM>)
    flash_bwd_short_sm80(const __grid_constant__ FlashBwdParams params) {
  using TileRows = SmemTile<BLOCK, HEAD_DIM>;  // of Q, K, V, dO, dQ, dK and dV
  using TileS = SmemTile<BLOCK, BLOCK>;
  using GridRows = WarpGrid<BLOCK, HEAD_DIM, NUM_WARPS>;
  using GridS = WarpGrid<BLOCK, BLOCK, NUM_WARPS>;
  using Options = ScoreOptions<T, false, false, static_cast<BiasKind>(BIAS), false>;
  constexpr bool HAS_DBIAS = has_gradient(Options::BIAS);
  constexpr int NUM_THREADS = NUM_WARPS * 32;
  constexpr int M = GridS::M;
  constexpr int N = GridS::N;
  constexpr int POOL_BYTES =
      3 * TileRows::BYTES > 2 * TileS::BYTES ? 3 * TileRows::BYTES : 2 * TileS::BYTES;
  constexpr int BIAS_OFFSET = 4 * TileRows::BYTES + POOL_BYTES;
  constexpr int BIAS_BYTES = Options::BIAS == BiasKind::NONE ? 0 : BLOCK * BLOCK * sizeof(float);
  static_assert(BIAS_OFFSET + BIAS_BYTES == SMEM_BYTES,
                "host and device disagree on shared memory");

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_k = smem_address(smem);
  const uint32_t smem_v = smem_k + TileRows::BYTES;
  const uint32_t smem_q = smem_v + TileRows::BYTES;
  const uint32_t smem_do = smem_q + TileRows::BYTES;
  const uint32_t smem_pool = smem_do + TileRows::BYTES;
  const uint32_t smem_p = smem_pool;
  const uint32_t smem_ds = smem_pool + TileS::BYTES;
  const uint32_t smem_dq = smem_pool;
  const uint32_t smem_dk = smem_pool + TileRows::BYTES;
  const uint32_t smem_dv = smem_pool + 2 * TileRows::BYTES;
  // Each thread reads the elements of the bias that it has written.
  float4* kept_bias = reinterpret_cast<float4*>(smem + BIAS_OFFSET) + threadIdx.x;
  __shared__ float lse_log2[BLOCK];
  __shared__ float delta[BLOCK];

  // ---- which sequences ----
  const AttentionShape& shape = params.shape;
  const int head = blockIdx.x % shape.heads_q;
  const int batch_step = gridDim.x / shape.heads_q;
  int batch = blockIdx.x / shape.heads_q;
  Sequence sequence = load_sequence(params, batch);

  // ---- copies ----
  constexpr int LANES_PER_ROW = NUM_THREADS / BLOCK;  // for delta
  constexpr int CHUNKS = HEAD_DIM / 8 / LANES_PER_ROW;
  static_assert(LANES_PER_ROW * BLOCK == NUM_THREADS && CHUNKS * LANES_PER_ROW * 8 == HEAD_DIM,
                "threads share the rows of O evenly");
  const int own_row = threadIdx.x / LANES_PER_ROW;
  const int own_chunk = threadIdx.x % LANES_PER_ROW;
  const Strides& out_strides = params.out_strides;
  RowPart<T, CHUNKS> part;
  const auto load_rows = [&](uint32_t to, const void* from, const Strides& strides, int64_t row,
                             int rows) {
    load_tile<TileRows, NUM_THREADS, ARCH>(
        to, static_cast<const T*>(from) + strides.at(batch, row, head), strides.row, rows,
        shape.head_dim);
  };
  const auto load_inputs = [&] {
    load_rows(smem_k, params.k, params.k_strides, sequence.start_k, sequence.seqlen_k);
    load_rows(smem_v, params.v, params.v_strides, sequence.start_k, sequence.seqlen_k);
    load_rows(smem_q, params.q, params.q_strides, sequence.start_q, sequence.seqlen_q);
    load_rows(smem_do, params.dout, params.dout_strides, sequence.start_q, sequence.seqlen_q);
    copies_commit<ARCH>();
    part = {};
    if (own_row >= sequence.seqlen_q) return;
    const int64_t row = sequence.start_q + own_row;
    const int64_t lse_row = batch * params.lse_batch_stride + head * params.lse_head_stride + row;
    part.lse = params.lse[lse_row];
    if (params.dlse) part.dlse = params.dlse[lse_row];
    const T* out = static_cast<const T*>(params.out) + out_strides.at(batch, row, head);
    const bool out_aligned = (reinterpret_cast<int64_t>(params.out) |
                              (out_strides.batch | out_strides.row | out_strides.head) * 2) %
                                 16 ==
                             0;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const int column = (own_chunk + i * LANES_PER_ROW) * 8;
      if (column >= shape.head_dim) continue;
      if (out_aligned) {
        part.out[i] = load_pack<8>(out + column);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) part.out[i].values[j] = out[column + j];
      }
    }
  };
  // Computes lse_log2 and delta of all rows, when dO has landed.
  const auto make_row_constants = [&] {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const uint32_t from = smem_do + TileRows::offset(own_row, own_chunk + i * LANES_PER_ROW);
      const auto dout = __builtin_bit_cast(Pack<T, 8>, ld_shared_128(from));
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum += to_float(dout.values[j]) * to_float(part.out[i].values[j]);
      }
    }
#pragma unroll
    for (int mask = 1; mask < LANES_PER_ROW; mask *= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (own_chunk == 0) {
      lse_log2[own_row] = row_lse_log2(part.lse);
      delta[own_row] = row_delta(part.lse, sum, part.dlse);
    }
  };

  const int lane = threadIdx.x % 32;
  const int row0 = GridS::row() + lane / 4;
  const int col = GridS::col() + lane % 4 * 2;
  const float alibi_slope = 0.f;
  const Score<Options, FlashBwdParams> score(params);
  Sequence longest = {};
  longest.seqlen_q = shape.seqlen_q;
  longest.seqlen_k = shape.seqlen_k;
  // The bias of a shorter sequence may hold anything behind the sequence's end.
  const bool keeps_bias = Options::BIAS != BiasKind::NONE && params.bias_strides.batch == 0 &&
                          !params.cu_seqlens_q && !params.cu_seqlens_k && !params.seqused_q &&
                          !params.seqused_k;
  const bool sums_dbias = HAS_DBIAS && params.dbias && params.dbias_strides.batch == 0;
  float acc_dbias[M][N][4];
  set_zero(acc_dbias);
  if (keeps_bias) {
    float bias[M][N][4];
    set_zero(bias);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      score.apply(bias[m], ScorePlace<Rows::QUERIES>{longest, batch, head, alibi_slope, nullptr,
                                                     row0 + m * 16, col});
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float (&x)[4] = bias[m][n];
        kept_bias[(m * N + n) * NUM_THREADS] = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
  }
  load_inputs();

  // ---- over the sequences ----
#pragma unroll 1
  for (;;) {
    copies_wait<ARCH>();
    __syncthreads();  // the copies have landed; no warp reads the pool or the constants any more
    make_row_constants();

    // ---- S = Q K^T, on top of the bias ----
    float acc_s[M][N][4];
    set_zero(acc_s);
    if (keeps_bias) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const float4 x = kept_bias[(m * N + n) * NUM_THREADS];
          acc_s[m][n][0] = x.x;
          acc_s[m][n][1] = x.y;
          acc_s[m][n][2] = x.z;
          acc_s[m][n][3] = x.w;
        }
      }
    }
    warp_gemm<T, ARCH, HEAD_DIM / 16>(acc_s, RowOperandA<TileRows>(smem_q, GridS::row()),
                                      RowOperandB<TileRows>(smem_k, GridS::col()));
    __syncthreads();  // lse_log2 and delta are complete

    // ---- score, P ----
    const auto place_of = [&](int m) -> ScorePlace<Rows::QUERIES> {
      return {sequence, batch, head, alibi_slope, nullptr, row0 + m * 16, col};
    };
    const bool masked = sequence.seqlen_k < BLOCK ||
                        query_tiles(sequence, 0, sequence.seqlen_k, BLOCK).needs_mask(0);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const ScorePlace<Rows::QUERIES> at = place_of(m);
      // Without queries the bias has no row to read.
      if (!keeps_bias && sequence.seqlen_q > 0) score.apply(acc_s[m], at);
      if (masked) score.apply_mask(acc_s[m], at);
      recompute_weights(acc_s[m], score, at,
                        [&](int, int i) { return lse_log2[row0 + m * 16 + i / 2 * 8]; });
    }
    store_fragments<TileS, T, ARCH>(smem_p, GridS::row(), GridS::col(), acc_s);

    // ---- dP = dO V^T, dS ----
    float acc_dp[M][N][4];
    set_zero(acc_dp);
    warp_gemm<T, ARCH, HEAD_DIM / 16>(acc_dp, RowOperandA<TileRows>(smem_do, GridS::row()),
                                      RowOperandB<TileRows>(smem_v, GridS::col()));
#pragma unroll
    for (int m = 0; m < M; ++m) {
      softmax_gradient<Options>(acc_dp[m], acc_s[m], shape,
                                [&](int, int i) { return delta[row0 + m * 16 + i / 2 * 8]; });
      if constexpr (HAS_DBIAS) {
        if (!sums_dbias) add_bias_gradient<Options>(acc_dp[m], params, place_of(m));
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) acc_dbias[m][n][i] += acc_dp[m][n][i];
        }
      }
    }
    store_fragments<TileS, T, ARCH>(smem_ds, GridS::row(), GridS::col(), acc_dp);
    __syncthreads();  // P and dS are complete

    // ---- dV = P^T dO, dK = dS^T Q, dQ = dS K ----
    constexpr int COLS = GridRows::TILE_COLS;
    const int grid_col = GridRows::col();
    const ColumnOperandA<TileS, GridRows::TILE_ROWS> p_transposed(smem_p, GridRows::row());
    const ColumnOperandA<TileS, GridRows::TILE_ROWS> ds_transposed(smem_ds, GridRows::row());
    // dV is stored at once where its place in the pool is none of P or dS: registers are scarce.
    constexpr bool EARLY_DV = TileRows::BYTES >= TileS::BYTES;
    float acc_dv[GridRows::M][GridRows::N][4];
    set_zero(acc_dv);
    warp_gemm<T, ARCH, BLOCK / 16>(acc_dv, p_transposed,
                                   ColumnOperandB<TileRows, COLS>(smem_do, grid_col));
    const auto store_dv = [&] {
      store_fragments<TileRows, T, ARCH>(smem_dv, GridRows::row(), grid_col, acc_dv);
    };
    if constexpr (EARLY_DV) store_dv();
    float acc_dk[GridRows::M][GridRows::N][4];
    float acc_dq[GridRows::M][GridRows::N][4];
    set_zero(acc_dk);
    set_zero(acc_dq);
    warp_gemm<T, ARCH, BLOCK / 16>(acc_dk, ds_transposed,
                                   ColumnOperandB<TileRows, COLS>(smem_q, grid_col));
    warp_gemm<T, ARCH, BLOCK / 16>(acc_dq, RowOperandA<TileS>(smem_ds, GridRows::row()),
                                   ColumnOperandB<TileRows, COLS>(smem_k, grid_col));
    __syncthreads();  // no warp reads the inputs, P or dS any more

    // ---- the copies of the next sequence; write dQ, dK and dV ----
    const Sequence done = sequence;
    const int done_batch = batch;
    batch += batch_step;
    const bool more = batch < shape.batch;
    if (more) {
      sequence = load_sequence(params, batch);
      load_inputs();
    }
    scale_by(acc_dq, shape.scale);
    scale_by(acc_dk, shape.scale);
    store_fragments<TileRows, T, ARCH>(smem_dq, GridRows::row(), grid_col, acc_dq);
    store_fragments<TileRows, T, ARCH>(smem_dk, GridRows::row(), grid_col, acc_dk);
    if constexpr (!EARLY_DV) store_dv();
    __syncthreads();  // the results are complete in the pool
    const auto store_rows = [&](void* to, const Strides& strides, uint32_t from, int64_t row,
                                int rows) {
      store_tile<TileRows, NUM_THREADS>(static_cast<T*>(to) + strides.at(done_batch, row, head),
                                        strides.row, from, rows, shape.head_dim);
    };
    store_rows(params.dq, params.dq_strides, smem_dq, done.start_q, done.seqlen_q);
    store_rows(params.dk, params.dk_strides, smem_dk, done.start_k, done.seqlen_k);
    store_rows(params.dv, params.dv_strides, smem_dv, done.start_k, done.seqlen_k);
    if (!more) break;
  }

  // ---- add the gradient of a bias that the batch shares ----
  if constexpr (HAS_DBIAS) {
    if (!sums_dbias) return;
    const BiasHead<float> dbias(params.dbias, params.dbias_strides, longest, 0, head);
#pragma unroll
    for (int m = 0; m < M; ++m) dbias.red_add_from(acc_dbias[m], row0 + m * 16, col);
  }
}
