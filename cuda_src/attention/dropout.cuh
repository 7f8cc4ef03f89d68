// Dropout of the weights in an accumulator fragment of 16 rows (see ptx/mma.cuh; wgmma accumulators
// have the same layout, warp by warp).
//
// The 16 random bits of weight (row, col) depend on its position alone, so that forward and
// backward, with any tiles, and the CPU drop the same weights. They come from the philox call (x,
// y) with
//   x = row / 16 * 8 + row % 8    y = col / 16 * 4 + col / 2 % 4
// and are a half of its word row / 8 % 2 * 2 + col / 8 % 2, the lower half if col is even. In this
// way one call serves the eight weights that a lane holds in two neighbouring fragments of eight
// columns. The caller multiplies by 1 / (1 - p) where that is cheapest.
#pragma once
#include "../common/philox.cuh"
#include "params.cuh"

// A dropped weight becomes 0, or gets a negative sign in the backward pass, which needs its value,
// too. Weights are never negative, so the sign is free to mark it.
enum class Dropped { ZERO, NEGATIVE };

// The weight, or 0 if its sign bit is set, which marks a dropped one. The maximum is that of
// integers, so that a NaN stays a NaN.
__device__ __forceinline__ float kept_weight(float weight) {
  return __int_as_float(max(__float_as_int(weight), 0));
}

// Params is FlashFwdParams or FlashBwdParams.
template <class Params>
__device__ __forceinline__ FirstWeight first_weight(const Params& params, int batch, int head) {
  if constexpr (HAS_USER_DROPOUT) {
    return text::first_weight(batch, head, params);
  } else {
    return {uint32_t(batch * params.shape.heads_q + head), 0, 0};
  }
}

struct Dropout {
  uint64_t seed;
  uint32_t limit;  // a weight is dropped if its bits, in the upper half of a word, are below this
  FirstWeight first;

  template <class Params>
  __device__ Dropout(uint64_t seed, const Params& params, int batch, int head)
      : seed(seed),
        limit(uint32_t(params.shape.dropout_threshold) << 16),
        first(first_weight(params, batch, head)) {}

  // Drops weights; row and col are those of acc[0][0] in this lane. The fragment starts at
  // multiples of 16.
  template <Dropped AS, int N>
  __device__ __forceinline__ void apply(float (&acc)[N][4], uint32_t row, uint32_t col) const {
    static_assert(N % 2 == 0, "random numbers come for 16 columns at a time");
    row += first.row;
    col += first.col;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const uint4 random =
          philox(seed, row / 16 * 8 + row % 8, (col / 16 + n / 2) * 4 + col / 2 % 4, first.z);
      const uint32_t words[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        drop<AS>(acc[n + w % 2][w / 2 * 2], words[w] << 16);
        drop<AS>(acc[n + w % 2][w / 2 * 2 + 1], words[w]);
      }
    }
  }

  // apply() for a fragment whose rows are keys and whose columns are queries. Lane and lane ^ 4
  // hold the same two queries, one with an even key and the other with the odd key after it. Both
  // need the same two calls, one for each query: half of each word is for the even key, the other
  // half for the odd one. So each lane makes one of the calls, keeps its own halves and sends the
  // others to its neighbour. All lanes of the warp must take part.
  template <Dropped AS, int N>
  __device__ __forceinline__ void apply_transposed(float (&acc)[N][4], uint32_t key,
                                                   uint32_t query) const {
    static_assert(N % 2 == 0, "random numbers come for 16 queries at a time");
    key += first.col;
    query += first.row;
    const bool odd = key % 2;
    const uint32_t own_halves = odd ? 0x7632 : 0x5410;  // byte selectors: the upper or lower halves
    const uint32_t other_halves = odd ? 0x5410 : 0x7632;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const uint4 random = philox(seed, (query / 16 + n / 2) * 8 + query % 8 + odd,
                                  key / 16 * 4 + key / 2 % 4, first.z);
      const uint32_t words[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {  // queries of acc[n + j]; the halves are for keys key, key + 8
        const uint32_t own = __byte_perm(words[2 * j], words[2 * j + 1], own_halves);
        const uint32_t other = __shfl_xor_sync(
            0xffffffffu, __byte_perm(words[2 * j], words[2 * j + 1], other_halves), 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t both = odd == (i == 1) ? own : other;
          drop<AS>(acc[n + j][i], both << 16);
          drop<AS>(acc[n + j][i + 2], both);
        }
      }
    }
  }

 private:
  template <Dropped AS>
  __device__ __forceinline__ void drop(float& weight, uint32_t random) const {
    if (random < limit) weight = AS == Dropped::ZERO ? 0.f : -weight;
  }
};
