// The gradient of a bias that all sequences of the batch share, on mma.sync (sm_75 and newer), for
// float16 and bfloat16:
//
//   dbias = sum of P * (dP - delta) over the sequences    P = exp2(scale_log2 * S - lse_log2)
//
// One block owns a tile of BLOCK_M queries and BLOCK_N keys of one head of the bias. It walks over
// the sequences of the batch (and over all heads, if these share the bias, too), recomputes the
// tile of P and dP, and adds dS up in registers. Where tiles are too few for the GPU, group_shares
// blocks divide the sequences; each stores its sums in dkv_partial, and flash_bwd_dbias_sum.cu adds
// them up. No two blocks write the same element, and the order of all sums is fixed, so that the
// result is deterministic and needs neither atomics nor zeros.
//
// flash_bwd_preprocess.cu comes before this kernel, and FlashBwdParams has the arrays. All lengths
// are those of the arrays. The bias, with the mask of a window, is where the accumulator of S = Q
// K^T begins, and -delta is where that of dP = dO V^T begins: neither costs an instruction per
// score.
//
// Template parameters. T is the dtype of Q; HEAD_DIM is that of the tiles, and a smaller head_dim
// is filled up with zeros; STEP_M is the number of 16-row fragments that a warp computes at a time,
// because S and dP of all its rows are more than its registers; ARCH is the compute capability (75
// has no cp.async); BIAS is DTYPE_OF_Q or FLOAT32, with a key mask or without; SMEM_BYTES is
// the dynamic shared memory, NUM_STAGES buffers of Q, dO, K and V.
//
// Why nothing is overwritten too early. The copies of the next sequence begin after the
// __syncthreads() behind which all warps have left the buffers that they fill; with one stage there
// is another one behind the products. No block waits for another.
#include "../../ptx/cp_async.cuh"
#include "../bias.cuh"
#include "../block_info.cuh"
#include "../mask.cuh"
#include "../params.cuh"
#include "../warp_gemm.cuh"
#include "bwd_warps.cuh"

// The constants of a stage: those of the query rows, and the bits of 256 keys.
template <int BLOCK_M>
struct alignas(16) DbiasConstants {
  float lse_log2[BLOCK_M];
  float delta[BLOCK_M];
  uint32_t key_bits[8];
};

template <int ARCH>
__device__ __forceinline__ void load_16(void* to, const void* from) {
  if constexpr (ARCH >= 80) {
    cp_async_16(smem_address(to), from, true);
  } else {
    copy_16(smem_address(to), from, true);
  }
}

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int STEP_M, int NUM_WARPS,
          int NUM_STAGES, int ARCH, int BIAS, int SMEM_BYTES>
__global__ void __launch_bounds__(NUM_WARPS * 32, 2)
    flash_bwd_dbias_sm80(const __grid_constant__ FlashBwdParams params) {
  constexpr BiasKind BIAS_KIND = static_cast<BiasKind>(BIAS);
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using TileKV = SmemTile<BLOCK_N, HEAD_DIM>;
  using Grid = WarpGrid<BLOCK_M, BLOCK_N, NUM_WARPS>;
  constexpr int NUM_THREADS = NUM_WARPS * 32;
  constexpr int STAGE_BYTES = 2 * (TileQ::BYTES + TileKV::BYTES);
  constexpr int M = Grid::M;
  constexpr int N = Grid::N;
  static_assert(NUM_STAGES * STAGE_BYTES == SMEM_BYTES, "host and device disagree");
  static_assert(ACCUM_ROW_ALIGN % BLOCK_M == 0 && BLOCK_N <= 128, "the constants hold all");
  static_assert(M % STEP_M == 0, "whole steps");
  static_assert(Grid::TILE_COLS == 32 && BLOCK_N % 32 == 0, "the keys of a warp are one word");

  // ---- which tile ----
  const AttentionShape& shape = params.shape;
  const int blocks_n = ceil_div(shape.seqlen_k, BLOCK_N);
  const int blocks_m = ceil_div(shape.seqlen_q, BLOCK_M);
  const int share = blockIdx.x % shape.group_shares;
  const int tile_index = blockIdx.x / shape.group_shares;
  const int n_block = tile_index % blocks_n;
  const int n_begin = n_block * BLOCK_N;
  const int m_begin = tile_index / blocks_n % blocks_m * BLOCK_M;
  const int first_head = tile_index / blocks_n / blocks_m;
  const int heads = params.dbias_strides.head ? 1 : shape.heads_q;  // that share the bias
  const Sequence sequence = load_sequence(params, 0);
  const int m_rows = min(BLOCK_M, shape.seqlen_q - m_begin);
  const int n_rows = min(BLOCK_N, shape.seqlen_k - n_begin);
  const TileRange n_range = key_tiles(sequence, m_begin, m_begin + m_rows, BLOCK_N);
  const bool seen = n_range.begin <= n_block && n_block < n_range.end;
  const int pairs = seen ? shape.batch * heads : 0;  // of a sequence and a head
  const int share_size = ceil_div(pairs, shape.group_shares);
  const int begin = share * share_size;
  const int end = min(pairs, begin + share_size);

  // ---- copies ----
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ DbiasConstants<BLOCK_M> constants[NUM_STAGES];
  const auto stage_address = [&](int stage) { return smem_address(smem) + stage * STAGE_BYTES; };
  const auto load = [&](int index, int stage) {
    const int batch = index / heads;
    const int head = first_head + index % heads;
    const int head_kv = head / (shape.heads_q / shape.heads_kv);
    const uint32_t to = stage_address(stage);
    const auto tile = [&](auto like, uint32_t offset, const void* from, const Strides& strides,
                          int row, int of_head, int rows) {
      load_tile<decltype(like), NUM_THREADS, ARCH>(
          to + offset, static_cast<const T*>(from) + strides.at(batch, row, of_head), strides.row,
          rows, shape.head_dim);
    };
    tile(TileQ{}, 0, params.q, params.q_strides, m_begin, head, m_rows);
    tile(TileQ{}, TileQ::BYTES, params.dout, params.dout_strides, m_begin, head, m_rows);
    tile(TileKV{}, 2 * TileQ::BYTES, params.k, params.k_strides, n_begin, head_kv, n_rows);
    tile(TileKV{}, 2 * TileQ::BYTES + TileKV::BYTES, params.v, params.v_strides, n_begin, head_kv,
         n_rows);
    const int64_t row = head * params.accum_rows +
                        int64_t(batch) * round_up(shape.seqlen_q, ACCUM_ROW_ALIGN) + m_begin;
    const int chunk = threadIdx.x * 4;
    if (chunk < BLOCK_M) {
      load_16<ARCH>(&constants[stage].lse_log2[chunk], params.lse_log2 + row + chunk);
      load_16<ARCH>(&constants[stage].delta[chunk], params.delta + row + chunk);
    }
    if (has_key_mask(BIAS_KIND) &&
        threadIdx.x / 2 == NUM_THREADS / 2 - 1) {  // two threads that have no rows
      const int word = threadIdx.x % 2 * 4;
      load_16<ARCH>(&constants[stage].key_bits[word],
                    KeyBits(params.bias, batch).words + n_begin / 128 * 4 + word);
    }
  };
  if (begin < end) load(begin, 0);
  copies_commit<ARCH>();

  // ---- the bias and the mask, which all sequences share ----
  const int row0 = Grid::row() + threadIdx.x % 32 / 4;
  const int col = Grid::col() + threadIdx.x % 4 * 2;
  const float scale_log2 = shape.scale * LOG2E;
  float terms[M][N][4];
  float sum[M][N][4];
  set_zero(terms);
  set_zero(sum);
  if (begin < end) {
    const ScoreBias<T, BIAS_KIND> bias(params, sequence, 0, first_head);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      bias.elements.add_to(terms[m], m_begin + row0 + m * 16, n_begin + col,
                           rcp_approx(shape.scale));
      if (n_range.needs_mask(n_block) || n_rows < BLOCK_N)
        mask_scores(terms[m], sequence, m_begin + row0 + m * 16, n_begin + col);
    }
  }

  // ---- over the sequences ----
  int stage = 0;
#pragma unroll 1
  for (int index = begin; index < end; ++index) {
    copies_wait<ARCH>();
    __syncthreads();  // the stage has landed; no warp reads the other one any more
    if (NUM_STAGES == 2 && index + 1 < end) load(index + 1, stage ^ 1);
    copies_commit<ARCH>();

    const uint32_t q = stage_address(stage);
    const uint32_t k = q + 2 * TileQ::BYTES;
    const DbiasConstants<BLOCK_M>& rows = constants[stage];
    const RowOperandB<TileKV> k_operand(k, Grid::col());
    const RowOperandB<TileKV> v_operand(k + TileKV::BYTES, Grid::col());
    const uint32_t key_bits =  // of this lane's columns
        rows.key_bits[(n_begin % 128 + Grid::col()) / 32] >> threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < M; m += STEP_M) {
      const int row = Grid::row() + m * 16;
      float s[STEP_M][N][4];
#pragma unroll
      for (int i = 0; i < STEP_M; ++i) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][n][e] = terms[m + i][n][e];
        }
      }
      warp_gemm<T, ARCH, HEAD_DIM / 16>(s, RowOperandA<TileQ>(q, row), k_operand);
#pragma unroll
      for (int i = 0; i < STEP_M; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float lse_log2 = rows.lse_log2[row0 + (m + i) * 16 + e / 2 * 8];
#pragma unroll
          for (int n = 0; n < N; ++n) {
            const bool is_seen = !has_key_mask(BIAS_KIND) || key_bits >> (n * 8 + e % 2) & 1;
            s[i][n][e] = is_seen ? exp2_approx(s[i][n][e] * scale_log2 - lse_log2) : 0.f;
          }
        }
      }
      float dp[STEP_M][N][4];
#pragma unroll
      for (int i = 0; i < STEP_M; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float delta = rows.delta[row0 + (m + i) * 16 + e / 2 * 8];
#pragma unroll
          for (int n = 0; n < N; ++n) dp[i][n][e] = -delta;
        }
      }
      warp_gemm<T, ARCH, HEAD_DIM / 16>(dp, RowOperandA<TileQ>(q + TileQ::BYTES, row), v_operand);
#pragma unroll
      for (int i = 0; i < STEP_M; ++i) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[m + i][n][e] += s[i][n][e] * dp[i][n][e];
        }
      }
    }
    if constexpr (NUM_STAGES == 1) {
      __syncthreads();  // no warp reads the stage any more
      if (index + 1 < end) load(index + 1, 0);
      copies_commit<ARCH>();
    }
    stage ^= NUM_STAGES - 1;
  }

  // ---- write dbias ----
  float* dbias = params.dbias;
  if (shape.group_shares > 1) {
    const int64_t size = int64_t(shape.heads_q / heads) * shape.seqlen_q * shape.seqlen_k;
    dbias = params.dkv_partial + share * size;
  }
  dbias += first_head * params.dbias_strides.head;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = row0 + m * 16 + e / 2 * 8;
      if (row >= m_rows) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int column = col + n * 8 + e % 2;
        if (column < n_rows)
          dbias[(m_begin + row) * params.dbias_strides.row + n_begin + column] = sum[m][n][e];
      }
    }
  }
}
