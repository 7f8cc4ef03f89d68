// FlashAttention-2 forward on mma.sync (sm_75 and newer), for float16 and bfloat16:
//
//   O   = softmax(score(Q K^T)) V    score.cuh has the score, FlashFwdParams the arrays with shapes
//   LSE = log(sum over keys of exp(score))
//
// This is the file to read first. The folder sm80 computes float16 on GPUs from Turing on, and
// bfloat16 from Ampere on, of tensors whose addresses and strides are multiples of 16 bytes:
//   forward    flash_fwd_sm80
//   backward   flash_bwd_preprocess, flash_bwd_sm80 or for narrow heads flash_bwd_keys_sm80, and
//              flash_bwd_postprocess_sm80; or for sequences of one tile flash_bwd_short_sm80 alone
//   dbias      flash_bwd_dbias_sm80, where all sequences share the bias
//
// One block computes BLOCK_M queries of one head. It walks over the tiles of BLOCK_N keys that they
// see, from the last to the first, with the online softmax of softmax.cuh.
//
//   warps          each owns BLOCK_M / NUM_WARPS queries (16 or 32), so that the softmax of a row
//                  stays within a warp; S, P and O live in registers
//   shared memory  Q [BLOCK_M][HEAD_DIM], one K tile and one V tile [BLOCK_N][HEAD_DIM]
//   overlap        V(n) is copied while S = Q K(n)^T runs, and K(n - 1) while O += P V(n) runs; the
//                  addresses of V(n) are computed between the products of S; of two or more blocks
//                  on a multiprocessor, one runs its softmax beside the products of another
//
// Template parameters. T is the dtype of Q; HEAD_DIM is that of the tiles, and a smaller head_dim
// is filled up with zeros; ARCH is the compute capability (75 has no cp.async); SOFTCAP, ALIBI,
// BIAS (a BiasKind) and DROPOUT are the options of the score; SMEM_BYTES is the dynamic shared
// memory.
//
// Eight warps on a multiprocessor leave each of its threads 255 registers: one block of eight, or
// two of four. The tiles for sequences of one tile are the exception: such a block mostly waits for
// memory, so it copies its first V together with Q and K, and ptxas is left to save registers, so
// that three to five blocks of four warps hide the waits of each other.
//
// Why nothing is overwritten too early. K and V have one buffer each. A __syncthreads() lies
// between the last read of a buffer and the copy that fills it again, and one between the end of a
// copy and the first read. No block waits for another, so the kernel ends.
//
// Source: FlashAttention-2, arXiv:2307.08691.
#include "../block_info.cuh"
#include "../params.cuh"
#include "../score.cuh"
#include "../softmax.cuh"
#include "../tile_order.cuh"
#include "../warp_gemm.cuh"
#include "fwd_tile.cuh"

// An operand A that calls work() after the first step of its product. In front of the product, the
// tensor cores would wait for the instructions of this work.
template <class Operand, class Work>
struct OperandBesideWork {
  const Operand& operand;
  const Work& work;

  __device__ OperandBesideWork(const Operand& operand, const Work& work)
      : operand(operand), work(work) {}

  __device__ __forceinline__ void load(uint32_t (&a)[4], int m, int k) const {
    operand.load(a, m, k);
    if (k == 1 && m == 0) work();
  }
};

constexpr bool is_short_tile(int block_m, int head_dim, int arch) {
  return block_m == 64 && head_dim <= 128 && arch >= 80;
}

template <typename T, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int NUM_WARPS, int ARCH, bool SOFTCAP,
          bool ALIBI, int BIAS, bool DROPOUT, int SMEM_BYTES>
__global__ void __launch_bounds__(NUM_WARPS * 32,
                                  is_short_tile(BLOCK_M, HEAD_DIM, ARCH) ? 0 : 8 / NUM_WARPS)
    flash_fwd_sm80(const __grid_constant__ FlashFwdParams params) {
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using TileKV = SmemTile<BLOCK_N, HEAD_DIM>;
  static_assert(TileQ::BYTES + 2 * TileKV::BYTES == SMEM_BYTES,
                "host and device disagree on shared memory");
  using Options = ScoreOptions<T, SOFTCAP, ALIBI, static_cast<BiasKind>(BIAS), DROPOUT>;
  constexpr int NUM_THREADS = NUM_WARPS * 32;
  constexpr bool SHORT = is_short_tile(BLOCK_M, HEAD_DIM, ARCH);
  constexpr int WARP_M = BLOCK_M / NUM_WARPS;
  constexpr int M = WARP_M / 16;
  static_assert(WARP_M % 16 == 0 && M >= 1, "a warp owns whole 16-row fragments");

  // ---- which tile ----
  const AttentionShape& shape = params.shape;
  __shared__ FwdBlock<T> block;
  __shared__ int64_t dropout_seed;
  if (threadIdx.x == 0) {
    block.locate(params, BLOCK_M, BLOCK_N);
    if constexpr (DROPOUT) dropout_seed = *params.dropout_seed;
  }
  __syncthreads();                // the tile is located
  if (block.m_rows <= 0) return;  // packed: past the end of this sequence

  // ---- first copies ----
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_q = smem_address(smem);
  const uint32_t smem_k = smem_q + TileQ::BYTES;
  const uint32_t smem_v = smem_k + TileKV::BYTES;
  const auto load_kv = [&](uint32_t dst, const T* src, int64_t row_stride, int n) {
    load_tile<TileKV, NUM_THREADS, ARCH>(dst, src + int64_t(n) * BLOCK_N * row_stride, row_stride,
                                         block.sequence.seqlen_k - n * BLOCK_N, shape.head_dim);
  };
  load_tile<TileQ, NUM_THREADS, ARCH>(smem_q, block.q, params.q_strides.row, block.m_rows,
                                      shape.head_dim);
  const int n_begin = block.n_range.begin;
  int n = block.n_range.end - 1;
  const int n_first = n;
  if (n >= n_begin) load_kv(smem_k, block.k, params.k_strides.row, n);
  if (SHORT && n >= n_begin) load_kv(smem_v, block.v, params.v_strides.row, n);
  copies_commit<ARCH>();

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * WARP_M;
  const RowOperandA<TileQ> operand_q(smem_q, warp_row);
  const RowOperandB<TileKV> operand_k(smem_k, 0);
  const ColumnOperandB<TileKV, HEAD_DIM> operand_v(smem_v, 0);
  const Score<Options, FlashFwdParams> score(params);

  RowState state[M];
#pragma unroll
  for (int m = 0; m < M; ++m) state[m].begin(score.scale_log2);
  float acc_o[M][HEAD_DIM / 8][4];
  set_zero(acc_o);

  // ---- over the key tiles, last first ----
#pragma unroll 1
  for (; n >= n_begin; --n) {
    copies_wait<ARCH>();
    __syncthreads();  // K(n) has landed; no warp reads V(n + 1) any more

    // ---- S = Q K^T ----
    const auto copy_v = [&] {
      if (SHORT && n == n_first) return;  // it is there
      load_kv(smem_v, block.v, params.v_strides.row, n);
      copies_commit<ARCH>();
    };
    float acc_s[M][BLOCK_N / 8][4];
    set_zero(acc_s);
    warp_gemm<T, ARCH, HEAD_DIM / 16>(acc_s, OperandBesideWork(operand_q, copy_v), operand_k);

    copies_wait<ARCH>();
    __syncthreads();  // V(n) has landed; no warp reads K(n) any more
    if (n > n_begin) load_kv(smem_k, block.k, params.k_strides.row, n - 1);
    copies_commit<ARCH>();

    // ---- score, softmax ----
    // The mask comes in one branch before all rows: behind the last branch, ptxas runs the softmax
    // of some rows beside that of others and beside the products.
    const auto place_of = [&](int m) -> ScorePlace<Rows::QUERIES> {
      return {
          block.sequence,
          block.batch,
          block.head,
          block.alibi_slope,
          &dropout_seed,
          block.m_begin + warp_row + m * 16 + lane / 4,
          n * BLOCK_N + lane % 4 * 2,
      };
    };
#pragma unroll
    for (int m = 0; m < M; ++m) score.apply(acc_s[m], place_of(m));
    if (block.n_range.needs_mask(n)) {
#pragma unroll
      for (int m = 0; m < M; ++m) score.apply_mask(acc_s[m], place_of(m));
    }
    bool moved = false;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      state[m].template update<SOFTCAP>(acc_s[m], score.scale_log2);
      score.apply_dropout(acc_s[m], place_of(m));
      moved |= state[m].rescale[0] != 1.f || state[m].rescale[1] != 1.f;
    }
    // ---- O += P V ----
    // Once the maxima have settled, most tiles leave them where they were. For narrow heads the
    // branch costs more than it saves: without it, ptxas runs the softmax beside the products.
    if (HEAD_DIM <= 64 || __any_sync(0xffffffffu, moved)) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 8; ++d) {
#pragma unroll
          for (int i = 0; i < 4; ++i) acc_o[m][d][i] *= state[m].rescale[i / 2];
        }
      }
    }
    const RegisterOperandA<T, ARCH, M, BLOCK_N / 8> operand_p(acc_s);
    warp_gemm<T, ARCH, BLOCK_N / 16>(acc_o, operand_p, operand_v);
  }

  // ---- normalise, write LSE, and O through the shared memory of Q ----
  copies_wait<ARCH>();
  __syncthreads();  // no warp reads Q any more, and no copy of Q is in flight
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float lse;
      float inverse = state[m].finish(half, score.scale_log2, lse, block.sink_log2);
      if constexpr (DROPOUT) inverse *= shape.dropout_scale;
      const int row = warp_row + m * 16 + half * 8 + lane / 4;
      if (params.lse && lane % 4 == 0 && row < block.m_rows) block.lse[row] = lse;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 8; ++d) {
        acc_o[m][d][2 * half] *= inverse;
        acc_o[m][d][2 * half + 1] *= inverse;
      }
    }
  }
  store_fragments<TileQ, T, ARCH>(smem_q, warp_row, 0, acc_o);
  __syncthreads();  // O is complete in shared memory
  store_tile<TileQ, NUM_THREADS>(block.out, params.out_strides.row, smem_q, block.m_rows,
                                 shape.head_dim);
}
