// Dropout of weights in an accumulator fragment of 16 rows (see ptx/mma.cuh). wgmma accumulators
// have the same layout, warp by warp.
//
// Weight (row, col) has word row / 8 % 2 * 2 + col / 8 % 2 of the random numbers number (x, y), its
// lower half if col is even, with x = row / 16 * 8 + row % 8 and y = col / 16 * 4 + col / 2 % 4: a
// call of philox gives the eight weights that a lane holds in two neighbouring fragments of eight
// columns. So forward and backward, with any tiles, and the CPU drop the same weights. The caller
// multiplies by 1 / (1 - p) where that is cheapest.
#pragma once
#include "../common/philox.cuh"
#include "params.cuh"

// A dropped weight becomes 0 or gets a negative sign. The backward needs its value beside the fact
// that it is dropped; weights are not negative, so the sign is free.
enum class Dropped { ZERO, NEGATIVE };

// The weight without its sign bit if it is set: 0 for what is dropped. As integers, so that NaN
// stays NaN.
__device__ __forceinline__ float kept_weight(float weight) {
  return __int_as_float(max(__float_as_int(weight), 0));
}

struct Dropout {
  uint64_t seed;
  uint32_t limit;  // 16 random bits in the upper half of a word drop a weight if they are below
  uint32_t z;

  __device__ Dropout(uint64_t seed, const AttentionShape& shape, int batch, int head)
      : seed(seed),
        limit(uint32_t(shape.dropout_threshold) << 16),
        z(batch * shape.heads_q + head) {}

  // row and col are those of acc[0][0] in this lane; the fragment starts at multiples of 16.
  template <Dropped AS, int N>
  __device__ __forceinline__ void apply(float (&acc)[N][4], uint32_t row, uint32_t col) const {
    static_assert(N % 2 == 0, "random numbers come for 16 columns at a time");
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const uint4 random =
          philox(seed, row / 16 * 8 + row % 8, (col / 16 + n / 2) * 4 + col / 2 % 4, z);
      const uint32_t words[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        drop<AS>(acc[n + w % 2][w / 2 * 2], words[w] << 16);
        drop<AS>(acc[n + w % 2][w / 2 * 2 + 1], words[w]);
      }
    }
  }

  // apply() on a fragment whose rows are keys and whose columns are queries. The four lanes of a
  // column and the next one's need the same calls, two each: half of a word is for the even key,
  // the other for the odd one. So a lane makes one call, for one of its two queries, and gives its
  // neighbour what it has no use for. All lanes of the warp take part.
  template <Dropped AS, int N>
  __device__ __forceinline__ void apply_transposed(float (&acc)[N][4], uint32_t key,
                                                   uint32_t query) const {
    static_assert(N % 2 == 0, "random numbers come for 16 queries at a time");
    const bool odd = key % 2;
    const uint32_t own_halves = odd ? 0x7632 : 0x5410;  // byte selectors: the upper or lower halves
    const uint32_t other_halves = odd ? 0x5410 : 0x7632;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const uint4 random =
          philox(seed, (query / 16 + n / 2) * 8 + query % 8 + odd, key / 16 * 4 + key / 2 % 4, z);
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
