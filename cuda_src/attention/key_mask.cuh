// A key mask: a bit for each key of each sequence, true where the queries see the key.
// mask_record.cu packs the bits and leaves them in memory behind a MaskRecord, to which params.bias
// then points; params.bias_strides stay those of the bias itself.
#pragma once
#include "mask_record.cuh"

// The bits of one sequence.
struct KeyBits {
  const uint32_t* words;

  __device__ explicit KeyBits(const uint32_t* words) : words(words) {}
  __device__ KeyBits(const void* record, int batch)
      : words(static_cast<const MaskRecord*>(record)->bits(batch)) {}

  __device__ bool sees(int key) const { return words[key / 32] >> key % 32 & 1; }

  // Returns the bits of 16 keys; `key` is a multiple of 16.
  __device__ uint32_t sixteen(int key) const {
    return reinterpret_cast<const uint16_t*>(words)[key / 16];
  }

  // Sets the scores of unseen keys to -inf, in a fragment whose columns are keys. `col` is that of
  // acc[0][0] in this lane. The lanes of a warp read the same bits, so they branch together.
  template <int N>
  __device__ __forceinline__ void apply(float (&acc)[N][4], int col) const {
    static_assert(N % 2 == 0, "the bits come 16 at a time");
    const int own = threadIdx.x % 4 * 2;  // the place of this lane's columns in every eight
    uint32_t bits[N / 2];
    uint32_t all = 0xffff;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) all &= bits[i] = sixteen(col - own + i * 16);
    if (all == 0xffff) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const uint32_t from_own = bits[n / 2] >> own;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!(from_own >> (n % 2 * 8 + i % 2) & 1)) acc[n][i] = -INF;
      }
    }
  }

  // apply() for a fragment whose rows are keys; `row` is that of acc[0][0].
  template <int N>
  __device__ __forceinline__ void apply_transposed(float (&acc)[N][4], int row) const {
    const int own = threadIdx.x % 32 / 4;  // the place of this lane's rows in every eight
    const uint32_t bits = sixteen(row - own) >> own;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (bits >> half * 8 & 1) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) acc[n][2 * half] = acc[n][2 * half + 1] = -INF;
    }
  }
};
