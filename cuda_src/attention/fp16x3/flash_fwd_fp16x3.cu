// FlashAttention-2 forward in float32 on mma.sync (sm_75 and newer), by three float16 products
// (parts.cuh):
//
//   O   = softmax(score(Q K^T)) V    score.cuh has the score, FlashFwdParams the arrays with shapes
//   LSE = log(sum over keys of exp(score))
//
// This is the file to read first, after parts.cuh and flash_fwd_sm80.cu. The folder fp16x3 computes
// float32 on GPUs from Turing on:
//   both       fp16x3_ranges, fp16x3_split; the kernels of simt, for sequences that cannot be split
//   forward    flash_fwd_fp16x3
//   backward   flash_bwd_preprocess, flash_bwd_fp16x3, flash_bwd_postprocess_fp16x3
//
// fp16x3_ranges.cu and fp16x3_split.cu come before it. The blocks, the warps and the overlap of
// copies and products are those of flash_fwd_sm80.cu; each tile in shared memory has PARTS float16
// parts. S and O V come scaled by powers of two: the scale of the softmax and the factor of the
// output take them away.
//
// Template parameters. HEAD_DIM is that of the parts; PARTS is 2, or 1 for products with the
// accuracy of TF32; ARCH is the compute capability (75 has no cp.async); SOFTCAP, ALIBI, BIAS (a
// BiasKind) and DROPOUT are the options of the score; SMEM_BYTES is the dynamic shared memory.
//
// flash_fwd_sm80.cu explains why nothing is overwritten too early, and why the kernel ends.
#include "../score.cuh"
#include "../sm80/fwd_tile.cuh"
#include "../softmax.cuh"
#include "parts.cuh"

constexpr int PV_COLUMNS = 16;  // of O in one product, whose accumulators are extra registers

// The part of a block that FwdBlock lacks.
struct FwdParts {
  const half_t* q;
  const half_t* k;
  const half_t* v;
  float from_scaled_s;    // 2^-e of Q K^T
  float from_scaled_out;  // 2^-e of P V
};

template <int HEAD_DIM>
__device__ __forceinline__ FwdParts locate_parts(const Fp16x3FwdParams& params,
                                                 const FwdBlock<float>& block) {
  const AttentionShape& shape = params.base.shape;
  const SplitInputs& split = params.split;
  const int head_kv = block.head / (shape.heads_q / shape.heads_kv);
  const HeadRange& range = split.ranges[int64_t(block.batch) * shape.heads_kv + head_kv];
  const int64_t first_q = params.base.cu_seqlens_q ? 0 : int64_t(block.batch) * shape.seqlen_q;
  const int64_t first_k = params.base.cu_seqlens_k ? 0 : int64_t(block.batch) * shape.seqlen_k;
  const int64_t row_q = first_q + block.sequence.start_q + block.m_begin;
  const int64_t row_k = first_k + block.sequence.start_k;
  const int exponent_s =
      scale_exponent(range, SplitTensor::Q) + scale_exponent(range, SplitTensor::K);
  return {head_parts<HEAD_DIM>(split.q, split.rows_q, block.head, row_q),
          head_parts<HEAD_DIM>(split.k, split.rows_k, head_kv, row_k),
          head_parts<HEAD_DIM>(split.v, split.rows_k, head_kv, row_k), power_of_two(-exponent_s),
          power_of_two(-scale_exponent(range, SplitTensor::V)) / WEIGHT_SCALE};
}

template <int HEAD_DIM, int BLOCK_M, int BLOCK_N, int NUM_WARPS, int PARTS, int ARCH, bool SOFTCAP,
          bool ALIBI, int BIAS, bool DROPOUT, int SMEM_BYTES>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    flash_fwd_fp16x3(const __grid_constant__ Fp16x3FwdParams params) {
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using TileKV = SmemTile<BLOCK_N, HEAD_DIM>;
  static_assert(PARTS * (TileQ::BYTES + 2 * TileKV::BYTES) == SMEM_BYTES,
                "host and device disagree on shared memory");
  constexpr bool TF32 = PARTS == 1;
  using Options = ScoreOptions<float, SOFTCAP, ALIBI, static_cast<BiasKind>(BIAS), DROPOUT, !TF32>;
  constexpr int NUM_THREADS = NUM_WARPS * 32;
  constexpr int WARP_M = BLOCK_M / NUM_WARPS;
  constexpr int M = WARP_M / 16;
  static_assert(WARP_M % 16 == 0 && M >= 1, "a warp owns whole 16-row fragments");

  // ---- which tile ----
  const AttentionShape& shape = params.base.shape;
  __shared__ FwdBlock<float> block;
  __shared__ FwdParts parts;
  __shared__ bool served;
  __shared__ int64_t dropout_seed;
  if (threadIdx.x == 0) {
    block.locate(params.base, BLOCK_M, BLOCK_N);
    if constexpr (DROPOUT) dropout_seed = *params.base.dropout_seed;
    if (block.m_rows > 0) parts = locate_parts<HEAD_DIM>(params, block);
  }
  if (threadIdx.x < 32) {
    __syncwarp();  // the sequence is known
    const bool serves = fp16x3_serves(params.split, block.batch, shape.heads_kv);
    if (threadIdx.x == 0) served = serves;
  }
  __syncthreads();                           // the tile is located
  if (block.m_rows <= 0 || !served) return;  // past the end, or for other kernels

  // ---- first copies ----
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_q = smem_address(smem);
  const uint32_t smem_k = smem_q + PARTS * TileQ::BYTES;
  const uint32_t smem_v = smem_k + PARTS * TileKV::BYTES;
  const auto load_kv = [&](uint32_t dst, const half_t* src, int n) {
    const int64_t to_low = shape.heads_kv * params.split.rows_k * HEAD_DIM;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      load_tile<TileKV, NUM_THREADS, ARCH>(
          dst + part * TileKV::BYTES, src + part * to_low + int64_t(n) * BLOCK_N * HEAD_DIM,
          HEAD_DIM, block.sequence.seqlen_k - n * BLOCK_N, HEAD_DIM);
    }
  };
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const int64_t to_low = shape.heads_q * params.split.rows_q * HEAD_DIM;
    load_tile<TileQ, NUM_THREADS, ARCH>(smem_q + part * TileQ::BYTES, parts.q + part * to_low,
                                        HEAD_DIM, block.m_rows, HEAD_DIM);
  }
  const int n_begin = block.n_range.begin;
  int n = block.n_range.end - 1;
  if (n >= n_begin) load_kv(smem_k, parts.k, n);
  copies_commit<ARCH>();

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * WARP_M;
  const RowParts<RowOperandA<TileQ>, TileQ> operand_q(smem_q, warp_row);
  const RowParts<RowOperandB<TileKV>, TileKV> operand_k(smem_k, 0);
  const ColumnParts<ColumnOperandB<TileKV, HEAD_DIM>, TileKV> operand_v(smem_v, 0);
  Score<Options, FlashFwdParams> score(params.base);
  (Options::HAS_SLOPE ? score.inner : score.scale_log2) *= parts.from_scaled_s;

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
    load_kv(smem_v, parts.v, n);
    copies_commit<ARCH>();

    // ---- S = Q K^T ----
    float acc_s[M][BLOCK_N / 8][4];
    product_of_parts<PARTS, ARCH, HEAD_DIM / 16, SCORE_STEPS<HEAD_DIM>>(acc_s, operand_q,
                                                                        operand_k);

    copies_wait<ARCH>();
    __syncthreads();  // V(n) has landed; no warp reads K(n) any more
    if (n > n_begin) load_kv(smem_k, parts.k, n - 1);
    copies_commit<ARCH>();

    // ---- score, softmax ----
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const ScorePlace<Rows::QUERIES> at = {
          block.sequence,
          block.batch,
          block.head,
          block.alibi_slope,
          &dropout_seed,
          block.m_begin + warp_row + m * 16 + lane / 4,
          n * BLOCK_N + lane % 4 * 2,
      };
      score.apply(acc_s[m], at);
      if (block.n_range.needs_mask(n)) score.apply_mask(acc_s[m], at);
      state[m].template update<SOFTCAP>(acc_s[m], score.scale_log2);
      score.apply_dropout(acc_s[m], at);
    }

    // ---- O = O * rescale + P V ----
    const RegisterParts<PARTS, ARCH, M, BLOCK_N / 8> operand_p(acc_s, WEIGHT_SCALE);
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += PV_COLUMNS) {
      float acc[M][PV_COLUMNS / 8][4];
      product_of_parts<PARTS, ARCH, BLOCK_N / 16>(acc, operand_p, operand_v, column / 16);
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int d = 0; d < PV_COLUMNS / 8; ++d) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& sum = acc_o[m][column / 8 + d][i];
            sum = sum * state[m].rescale[i / 2] + acc[m][d][i];
          }
        }
      }
    }
  }

  // ---- normalise, write LSE and O ----
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float lse;
      float inverse = state[m].finish(half, score.scale_log2, lse, block.sink_log2);
      inverse *= parts.from_scaled_out;
      if constexpr (DROPOUT) inverse *= shape.dropout_scale;
      const int row = warp_row + m * 16 + half * 8 + lane / 4;
      if (row >= block.m_rows) continue;
      if (params.base.lse && lane % 4 == 0) block.lse[row] = lse;
      float* out = block.out + row * params.base.out_strides.row;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 8; ++d) {
        const int column = d * 8 + lane % 4 * 2;
        if (column >= shape.head_dim) continue;
        *reinterpret_cast<float2*>(out + column) =
            make_float2(acc_o[m][d][2 * half] * inverse, acc_o[m][d][2 * half + 1] * inverse);
      }
    }
  }
}
