// What the backward kernels need of every query row, and clean accumulators:
//   delta    = sum of dout * out over the head dimension
//   lse_log2 = lse * log2(e), or +inf where the row has no probability (it saw no key, or it is
//              padding up to the next multiple of ACCUM_ROW_ALIGN), so that exp2(score - lse_log2)
//              is 0 there without a mask; delta is 0 in those rows
//   dq_accum = 0, if the family has one
//
// One warp handles ROWS_PER_WARP consecutive rows of one head, all loads before the first sum: the
// kernel does nothing but wait for memory. Reads 16 bytes a lane if every row allows it.
#include "../common/convert.cuh"
#include "../ptx/math.cuh"
#include "block_info.cuh"

constexpr int WARPS = 8;
constexpr int ROWS_PER_WARP = 4;
constexpr int ROWS_PER_BLOCK = WARPS * ROWS_PER_WARP;
static_assert(ACCUM_ROW_ALIGN % ROWS_PER_BLOCK == 0, "a block stays within one sequence");

// N values of T that one load fetches.
template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T values[N];
};

// sums[r] += dot product of row r of a and b, this lane's share of it.
template <int N, typename T>
__device__ __forceinline__ void add_row_products(float (&sums)[ROWS_PER_WARP], const T* a,
                                                 const T* b, int64_t a_stride, int64_t b_stride,
                                                 int rows, int columns) {
  for (int column = int(threadIdx.x) % 32 * N; column < columns; column += 32 * N) {
    Pack<T, N> x[ROWS_PER_WARP], y[ROWS_PER_WARP];
#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r) {
      if (r >= rows) continue;
      x[r] = *reinterpret_cast<const Pack<T, N>*>(a + r * a_stride + column);
      y[r] = *reinterpret_cast<const Pack<T, N>*>(b + r * b_stride + column);
    }
#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r) {
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

template <typename T, int ACCUM_DIM>
__global__ void __launch_bounds__(WARPS * 32) flash_bwd_preprocess(const FlashBwdParams params) {
  // ---- which rows ----
  const AttentionShape& shape = params.shape;
  const int blocks_per_head = round_up(shape.seqlen_q, ACCUM_ROW_ALIGN) / ROWS_PER_BLOCK;
  const int head = blockIdx.x / blocks_per_head % shape.heads_q;
  const int batch = blockIdx.x / blocks_per_head / shape.heads_q;
  const Sequence sequence = load_sequence(shape, batch, params.cu_seqlens_q, params.cu_seqlens_k);
  const int lane = int(threadIdx.x) % 32;
  const int row =
      blockIdx.x % blocks_per_head * ROWS_PER_BLOCK + int(threadIdx.x) / 32 * ROWS_PER_WARP;
  if (row >= round_up(sequence.seqlen_q, ACCUM_ROW_ALIGN)) return;
  const int rows = sequence.seqlen_q - row;  // the others are padding

  // ---- delta ----
  const auto row_pointer = [&](const void* data, const Strides& strides) {
    return static_cast<const T*>(data) + strides.at(batch, sequence.start_q + row, head);
  };
  const T* dout = row_pointer(params.dout, params.dout_strides);
  const T* out = row_pointer(params.out, params.out_strides);
  constexpr int VECTOR = 16 / sizeof(T);
  const bool vector = shape.head_dim % VECTOR == 0 && aligned_16(dout, params.dout_strides) &&
                      aligned_16(out, params.out_strides);
  float sums[ROWS_PER_WARP] = {};
  if (vector) {
    add_row_products<VECTOR>(sums, dout, out, params.dout_strides.row, params.out_strides.row, rows,
                             shape.head_dim);
  } else {
    add_row_products<1>(sums, dout, out, params.dout_strides.row, params.out_strides.row, rows,
                        shape.head_dim);
  }
  float delta = 0.0f;  // of row lane
#pragma unroll
  for (int r = 0; r < ROWS_PER_WARP; ++r) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], mask);
    if (lane == r) delta = sums[r];
  }

  // ---- write the rows' constants ----
  const int64_t accum_row = head * params.accum_rows + sequence.accum_start + row;
  if (lane < ROWS_PER_WARP) {
    float lse = -INF;
    if (lane < rows)
      lse = params.lse[batch * params.lse_batch_stride + head * params.lse_head_stride +
                       sequence.start_q + row + lane];
    params.lse_log2[accum_row + lane] = lse == -INF ? INF : lse * LOG2E;
    params.delta[accum_row + lane] = lse == -INF ? 0.0f : delta;
  }

  // ---- clean accumulators ----
  if constexpr (ACCUM_DIM > 0) {
    static_assert(ACCUM_DIM % 4 == 0, "16 bytes a store");
    float4* accum = reinterpret_cast<float4*>(params.dq_accum + accum_row * ACCUM_DIM);
    for (int i = lane; i < ROWS_PER_WARP * ACCUM_DIM / 4; i += 32)
      accum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}
