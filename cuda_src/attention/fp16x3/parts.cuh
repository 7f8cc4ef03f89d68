// float32 products on the tensor cores, by three products of float16 (Ootomo & Yokota,
// arXiv:2203.03341). A float x is scaled by a power of two and split,
//
//   2^e x = high + 2^-11 low      high = float16(2^e x), low = float16(2^11 (2^e x - high))
//   A B   = A_high B_high + 2^-11 (A_low B_high + A_high B_low)
//
// The parts hold 22 bits of x. The product of the low parts, 2^-22 of the result, is left out.
//
// Range. All rows of a head have one exponent e, for which the largest |2^e x| lies in [2^14,
// 2^15). Every |2^e x| >= 2^-14 then keeps its 22 bits, and the parts of a smaller one end at
// 2^-36; without the factor of the low parts they would end at 2^-25. A head may be split if its
// rows are alike: if the largest element of each row that is not zero is at least 2^-17 of that of
// the head. What is left of the range is for dS, which is smaller than the bound that gives its
// scale, by the weights P among others. fp16x3_serves() says whether this holds for all heads of a
// sequence. Where it does not, or where there are infinities or NaN, the kernels of this method
// return at once, and the kernels for CUDA cores, which run behind them, compute the sequence.
//
// Rounding. A tensor core truncates its accumulator after each step, always towards zero, so that a
// long sum in one accumulator becomes too small. Each product of tiles here has accumulators of its
// own, and float32 arithmetic adds its result to the sum. The two small products share a second
// accumulator, so that they do not add steps to the large one.
//
// A large score has lost its last digits so, and the LSE with it. That hardly shows in the weights
// of a backward that recomputes the score by the same steps. Where the backward of wide heads runs
// on CUDA cores, the sum of a score is divided (SCORE_STEPS).
#pragma once
#include "../warp_gemm.cuh"
#include "params.cuh"

constexpr float LOW_SCALE = 0x1p11f;  // the factor of the low parts
constexpr int MAX_SCALED_LOG2 = 14;   // the exponent of the largest scaled element
constexpr int MAX_ROW_SPREAD = 17;    // log2 of the largest row over the smallest one
constexpr int MAX_EXPONENT = 80;      // of a scale and of the product of two scales

// 2^e for -126 <= e <= 127.
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

__device__ __forceinline__ int exponent_of(uint32_t bits) { return int(bits >> 23) - 127; }

// The exponent e of a tensor's scale.
__device__ __forceinline__ int scale_exponent(const HeadRange& range, SplitTensor tensor) {
  const uint32_t max = range.max[static_cast<int>(tensor)];
  return max == 0 ? 0 : MAX_SCALED_LOG2 - exponent_of(max);
}

// Whether the parts of a tensor are as accurate as float32 arithmetic.
__device__ __forceinline__ bool can_split(const HeadRange& range, SplitTensor tensor) {
  const uint32_t max = range.max[static_cast<int>(tensor)];
  const uint32_t min = ~range.not_min[static_cast<int>(tensor)];
  if (max == 0) return true;  // all zeros, or no rows
  return exponent_of(max) - exponent_of(min) <= MAX_ROW_SPREAD &&
         abs(scale_exponent(range, tensor)) <= MAX_EXPONENT;
}

// Whether a head can be split. In a forward pass dout and delta count as zeros.
__device__ __forceinline__ bool can_split(const HeadRange& range) {
  const int q = scale_exponent(range, SplitTensor::Q);
  const int k = scale_exponent(range, SplitTensor::K);
  const int v = scale_exponent(range, SplitTensor::V);
  const int dout = scale_exponent(range, SplitTensor::DOUT);
  return can_split(range, SplitTensor::Q) && can_split(range, SplitTensor::K) &&
         can_split(range, SplitTensor::V) && can_split(range, SplitTensor::DOUT) &&
         abs(q + k) <= MAX_EXPONENT && abs(v + dout) <= MAX_EXPONENT &&
         exponent_of(range.delta) <= MAX_EXPONENT;
}

// Whether this method computes a sequence. All lanes of a warp call it.
__device__ __forceinline__ bool fp16x3_serves(const SplitInputs& split, int batch, int heads_kv) {
  bool fits = true;
  for (int head = threadIdx.x % 32; head < heads_kv; head += 32) {
    fits &= can_split(split.ranges[int64_t(batch) * heads_kv + head]);
  }
  return __all_sync(0xffffffffu, fits);
}

// The factor of P, whose elements are at most 1; float16 ends at 65504.
constexpr float WEIGHT_SCALE = 0x1p15f;

// The exponent of the scale of dS = P (dP - delta), for which |2^e dS| < 2^15. |dP| is at most the
// product of the largest norms of dO and V, divided by 1 - p with dropout. That is no bound of
// delta, which has the gradient of the LSE in it, and whose out may be that of more keys.
//
// The scaled dS keeps 22 bits down to 2^-14, 2^-28 of the bound. With rows of dO and V that differ
// by 1000 each, a weight P of 2^-8 still reaches that, and smaller ones lose a bit each time they
// halve.
__device__ __forceinline__ int gradient_exponent(const HeadRange& range,
                                                 const AttentionShape& shape) {
  const auto norm = [&](SplitTensor tensor) {
    return sqrt_approx(__uint_as_float(range.square_norm[static_cast<int>(tensor)])) *
           power_of_two(-scale_exponent(range, tensor));
  };
  const float bound = norm(SplitTensor::DOUT) * norm(SplitTensor::V) * shape.dropout_scale +
                      __uint_as_float(range.delta);
  return bound == 0.f
             ? 0
             : max(-100, min(100, MAX_SCALED_LOG2 - 1 - exponent_of(__float_as_uint(bound))));
}

// ---- splitting ----

// Splits two floats into packed pairs of float16, part 0 the high parts. With PARTS = 1 there are
// no low parts: the product has the accuracy of TF32, whose mantissa is that of float16.
template <int PARTS, int ARCH>
__device__ __forceinline__ void split_pair(float x, float y, uint32_t (&parts)[PARTS]) {
  parts[0] = pack<half_t, ARCH>(x, y);
  if constexpr (PARTS == 2) {
    parts[1] = pack<half_t, ARCH>((x - cvt_f32_f16(uint16_t(parts[0]))) * LOW_SCALE,
                                  (y - cvt_f32_f16(uint16_t(parts[0] >> 16))) * LOW_SCALE);
  }
}

// Stores the parts of `factor` times a warp's accumulators, as store_fragments() does.
template <class Tile, int PARTS, int ARCH, int M, int N>
__device__ __forceinline__ void store_parts(uint32_t smem, int row, int col,
                                            const float (&acc)[M][N][4], float factor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t parts[PARTS];
        split_pair<PARTS, ARCH>(acc[m][n][2 * half] * factor, acc[m][n][2 * half + 1] * factor,
                                parts);
        const uint32_t address =
            smem + Tile::offset(row + m * 16 + half * 8 + lane / 4, col / 8 + n) + lane % 4 * 4;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          st_shared_32(address + part * Tile::BYTES, parts[part]);
        }
      }
    }
  }
}

// ---- operands: as in warp_gemm.cuh, with the tile of the low parts behind that of the high ----

// Steps of 16 rows from a tile of high parts to that of the low parts.
template <class Tile>
constexpr int TO_LOW_PARTS = Tile::BYTES / Tile::ROW_BYTES / 16;

// Operand is RowOperandA or RowOperandB of Tile.
template <class Operand, class Tile>
struct RowParts : Operand {
  using Operand::Operand;
  __device__ void load(uint32_t (&x)[4], int index, int k, int part) const {
    Operand::load(x, index + part * TO_LOW_PARTS<Tile>, k);
  }
};

// Operand is ColumnOperandA or ColumnOperandB of Tile.
template <class Operand, class Tile>
struct ColumnParts : Operand {
  using Operand::Operand;
  __device__ void load(uint32_t (&x)[4], int index, int k, int part) const {
    Operand::load(x, index, k + part * TO_LOW_PARTS<Tile>);
  }
};

// `factor` times accumulators, as operand A in registers.
template <int PARTS, int ARCH, int M, int N>
struct RegisterParts {
  uint32_t fragment[M][N / 2][4][PARTS];
  __device__ RegisterParts(const float (&acc)[M][N][4], float factor) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          split_pair<PARTS, ARCH>(acc[m][n][2 * half] * factor, acc[m][n][2 * half + 1] * factor,
                                  fragment[m][n / 2][n % 2 * 2 + half]);
        }
      }
    }
  }
  __device__ void load(uint32_t (&a)[4], int m, int k, int part) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = fragment[m][k][i][part];
  }
};

template <int M, int N>
__device__ __forceinline__ void add_to(float (&acc)[M][N][4], const float (&x)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] += x[m][n][i];
    }
  }
}

// The steps of Q K^T that share an accumulator.
constexpr int WIDEST_BACKWARD = __CUDA_ARCH__ == 900 ? 256 : __CUDA_ARCH__ == 750 ? 64 : 128;
template <int HEAD_DIM>
constexpr int SCORE_STEPS = HEAD_DIM > WIDEST_BACKWARD ? 2 : HEAD_DIM / 16;

// acc = A B over K_STEPS steps of 16; B from 16 * n_begin columns on. At most SUM_STEPS steps of
// the large product share an accumulator.
template <int PARTS, int ARCH, int K_STEPS, int SUM_STEPS = K_STEPS, class A, class B, int M, int N>
__device__ __forceinline__ void product_of_parts(float (&acc)[M][N][4], const A& a_operand,
                                                 const B& b_operand, int n_begin = 0) {
  static_assert(N % 2 == 0, "B comes 16 columns at a time");
  static_assert(K_STEPS % SUM_STEPS == 0, "sums of equal length");
  constexpr bool ONE_SUM = SUM_STEPS == K_STEPS;
  float small[M][N][4], share[M][N][4];
  set_zero(acc);
  set_zero(small);
  set_zero(share);
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) {
    uint32_t a[PARTS][M][4];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int m = 0; m < M; ++m) a_operand.load(a[part][m], m, k, part);
    }
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      const auto multiply = [&](float (&sum)[M][N][4], int a_part, const uint32_t (&b)[4]) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
          mma_m16n8k16<half_t, ARCH>(sum[m][2 * n], a[a_part][m], b[0], b[1]);
          mma_m16n8k16<half_t, ARCH>(sum[m][2 * n + 1], a[a_part][m], b[2], b[3]);
        }
      };
      uint32_t b[4];
      b_operand.load(b, n_begin + n, k, 0);
      multiply(ONE_SUM ? acc : share, 0, b);
      if constexpr (PARTS == 2) {
        multiply(small, 1, b);
        b_operand.load(b, n_begin + n, k, 1);
        multiply(small, 0, b);
      }
    }
    if (!ONE_SUM && (k + 1) % SUM_STEPS == 0) {
      add_to(acc, share);
      set_zero(share);
    }
  }
  if constexpr (PARTS == 2) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][n][i] += small[m][n][i] * (1.f / LOW_SCALE);
      }
    }
  }
}

// The parts of row `row` of a head in global memory: part 0.
template <int HEAD_DIM>
__device__ __forceinline__ const half_t* head_parts(const half_t* data, int64_t rows, int head,
                                                    int64_t row) {
  return data + (head * rows + row) * HEAD_DIM;
}

// Stores `factor` times a warp's accumulators to float32 rows in global memory; `row` and
// `col` are those of the warp, and `rows` and head_dim the ends.
template <int M, int N>
__device__ __forceinline__ void store_gradient(float* out, int64_t row_stride, int row, int rows,
                                               int col, int head_dim, const float (&acc)[M][N][4],
                                               float factor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own_row = row + m * 16 + half * 8 + lane / 4;
      if (own_row >= rows) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int own_col = col + n * 8 + lane % 4 * 2;
        if (own_col >= head_dim) continue;
        *reinterpret_cast<float2*>(out + own_row * row_stride + own_col) =
            make_float2(acc[m][n][2 * half] * factor, acc[m][n][2 * half + 1] * factor);
      }
    }
  }
}
