// Computes two constants of every query row for the backward kernels, and clears their accumulator:
//   delta    = sum of dout * out over the head dimension, minus the gradient of the LSE if there is
//              one, because both enter dS = P * (dP - delta) in the same way
//   lse_log2 = lse * log2(e), or +inf for a row without weights (it saw no key, or it is padding up
//              to the next multiple of ACCUM_ROW_ALIGN), so that exp2(score - lse_log2) is 0 there
//              without a mask; delta is 0 in those rows. From HUGE_LSE on it is NaN: float32 keeps
//              no digit of the weights there, and no gradient is better than a wrong one
//   dq_accum = 0, if CLEARS and the backend has one
//
// The time is that of memory. A warp handles ROWS_PER_WARP consecutive rows of one head, and Lanes
// says which lane reads which part of them, by loads of 16 bytes if all rows are aligned. The
// stores of zeros come first, since no instruction waits for them, and then all loads before the
// first sum. Consecutive blocks handle the same rows of all heads, since these are usually
// contiguous. Nothing is shared between warps.
//
// Template parameters: T is the dtype of out, ACCUM_DIM the number of columns of dq_accum, or 0
// without one, and CLEARS whether this kernel has to clear it.
#include "../common/convert.cuh"
#include "../common/pack.cuh"
#include "../ptx/math.cuh"
#include "block_info.cuh"
#include "row_constants.cuh"

constexpr int WARPS = 4;
constexpr int ROWS_PER_WARP = 8;
constexpr int ROWS_PER_BLOCK = WARPS * ROWS_PER_WARP;
static_assert(ACCUM_ROW_ALIGN % ROWS_PER_BLOCK == 0, "a block stays within one sequence");

// PER_ROW neighbouring lanes read a row together, and each group of them reads ROWS consecutive
// rows.
template <typename T, int ACCUM_DIM>
struct Lanes {
  static constexpr int VECTOR = 16 / sizeof(T);
  static constexpr int LOADS = ACCUM_DIM > 0 ? ceil_div(ACCUM_DIM, VECTOR) : 16;  // loads of a row
  static constexpr int PER_ROW = LOADS <= 4 ? 4 : LOADS <= 8 ? 8 : LOADS <= 16 ? 16 : 32;
  static constexpr int ROWS = ROWS_PER_WARP * PER_ROW / 32;
};

// Adds to sums[r] this lane's share of the dot product of row r of a and b, by loads of N elements.
template <int N, int PER_ROW, int ROWS, typename T>
__device__ __forceinline__ void add_row_products(float (&sums)[ROWS], const T* a, const T* b,
                                                 int64_t a_stride, int64_t b_stride, int rows,
                                                 int columns) {
#pragma unroll 1
  for (int column = threadIdx.x % PER_ROW * N; column < columns; column += PER_ROW * N) {
    Pack<T, N> x[ROWS], y[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r >= rows) continue;
      x[r] = load_pack<N>(a + r * a_stride + column);
      y[r] = load_pack<N>(b + r * b_stride + column);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r >= rows) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) sums[r] += to_float(x[r].values[i]) * to_float(y[r].values[i]);
    }
  }
}

template <typename T>
__device__ __forceinline__ bool aligned_16(const T* data, const Strides& strides) {
  const int64_t all = reinterpret_cast<int64_t>(data) |
                      (strides.batch | strides.row | strides.head) * int64_t(sizeof(T));
  return all % 16 == 0;
}

template <typename T, int ACCUM_DIM, bool CLEARS>
__global__ void __launch_bounds__(WARPS * 32) flash_bwd_preprocess(const FlashBwdParams params) {
  // ---- which rows ----
  using L = Lanes<T, ACCUM_DIM>;
  const AttentionShape& shape = params.shape;
  const int blocks_per_head = round_up(shape.seqlen_q, ACCUM_ROW_ALIGN) / ROWS_PER_BLOCK;
  const int head = blockIdx.x % shape.heads_q;
  const int block = blockIdx.x / shape.heads_q % blocks_per_head;
  const int batch = blockIdx.x / shape.heads_q / blocks_per_head;
  const Sequence sequence = load_sequence(params, batch);
  const int lane = threadIdx.x % 32;
  const int warp_row = block * ROWS_PER_BLOCK + int(threadIdx.x / 32) * ROWS_PER_WARP;
  if (warp_row >= round_up(sequence.seqlen_q, ACCUM_ROW_ALIGN)) return;
  const int row = warp_row + lane / L::PER_ROW * L::ROWS;  // the first of this lane's rows
  const int rows = sequence.seqlen_q - row;                // rows from this one on are padding
  const int64_t accum_row = head * params.accum_rows + sequence.accum_start;

  // Lane `own` of a group writes the constants of row `own` of the group.
  const int own = lane % L::PER_ROW;
  float lse = -INF;
  float dlse = 0.0f;
  if (own < min(L::ROWS, rows)) {
    const int64_t lse_row = batch * params.lse_batch_stride + head * params.lse_head_stride +
                            sequence.start_q + row + own;
    lse = params.lse[lse_row];
    if (params.dlse) dlse = params.dlse[lse_row];
  }

  // ---- clean accumulators ----
  if constexpr (CLEARS && ACCUM_DIM > 0) {
    constexpr int STORES = ROWS_PER_WARP * ACCUM_DIM / 4;
    static_assert(STORES % 32 == 0, "16 bytes a store, all lanes");
    float4* accum = reinterpret_cast<float4*>(params.dq_accum + (accum_row + warp_row) * ACCUM_DIM);
#pragma unroll
    for (int i = 0; i < STORES; i += 32) accum[i + lane] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  // ---- delta ----
  const auto row_pointer = [&](const void* data, const Strides& strides) {
    return static_cast<const T*>(data) + strides.at(batch, sequence.start_q + row, head);
  };
  const T* dout = row_pointer(params.dout, params.dout_strides);
  const T* out = row_pointer(params.out, params.out_strides);
  const bool vector = shape.head_dim % L::VECTOR == 0 && aligned_16(dout, params.dout_strides) &&
                      aligned_16(out, params.out_strides);
  float sums[L::ROWS] = {};
  if (vector) {
    add_row_products<L::VECTOR, L::PER_ROW>(sums, dout, out, params.dout_strides.row,
                                            params.out_strides.row, rows, shape.head_dim);
  } else {
    add_row_products<1, L::PER_ROW>(sums, dout, out, params.dout_strides.row,
                                    params.out_strides.row, rows, shape.head_dim);
  }
  float delta = 0.0f;  // that of row `own`
#pragma unroll
  for (int r = 0; r < L::ROWS; ++r) {
#pragma unroll
    for (int mask = 1; mask < L::PER_ROW; mask *= 2)
      sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], mask);
    if (own == r) delta = sums[r];
  }

  // ---- write the rows' constants ----
  if (own < L::ROWS) {
    params.lse_log2[accum_row + row + own] = row_lse_log2(lse);
    params.delta[accum_row + row + own] = row_delta(lse, delta, dlse);
  }
}
