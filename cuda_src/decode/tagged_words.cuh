// How blocks tell each other numbers without waiting for each other first: as floats whose lowest
// bit is a tag, which flips whenever a number is replaced. A reader loads until the tags are those
// of the round that it wants, and so has the number as soon as it is in L2, without the two trips
// of a barrier before.
//
// One bit is enough. Every block has rows of every matrix, so each reads every round of a vector,
// and what it writes then is needed, directly or not, before any number of that vector is replaced:
// a number is of the round that a reader wants, or of the one before. The rounds go on from launch
// to launch, so all numbers that exist are replaced in each, also those that nobody reads.
#pragma once
#include "../ptx/relaxed.cuh"
#include "stack_params.cuh"

// Where a column of a vector lies: bits 2 and 3 are exchanged. A lane takes eight columns in two
// loads of 16 bytes, and so two lanes fill a sector of 32 bytes with each; a row has `row_words`.
__device__ __forceinline__ int place(int column) {
  return (column & ~12) | (column & 4) << 1 | (column & 8) >> 1;
}
constexpr int NEXT_FOUR = 8;  // from a lane's first load to its second
__host__ __device__ constexpr int row_words(int columns) { return round_up(columns, 16); }

__device__ __forceinline__ float tagged(float value, uint32_t tag) {
  return __uint_as_float((__float_as_uint(value) & ~1u) | tag);
}
__device__ __forceinline__ float untagged(float word) { return tagged(word, 0); }
__device__ __forceinline__ void send(float* word, float value, uint32_t tag) {
  st_relaxed(word, tagged(value, tag));
}

// All blocks read the same words, and what many ask for at once is served one after the other. So
// there are several copies of what all of them read; a block reads one.
template <int SEQUENCES>
constexpr int COPIES = MAX_BATCH / SEQUENCES;
template <int SEQUENCES>
__device__ __forceinline__ int own_copy() {
  return blockIdx.x % COPIES<SEQUENCES>;
}

// Where a column of the n-th vector lies in one of the copies of it.
__device__ __forceinline__ float* residual_word(const DecodeStackParams& params, int copy, int n,
                                                int column) {
  return params.residual + copy * params.copy_words + n * row_words(params.width) + place(column);
}
__device__ __forceinline__ float* hidden_word(const DecodeStackParams& params, int copy, int n,
                                              int column) {
  return params.hidden + copy * params.copy_words + int64_t(n) * row_words(params.hidden_width) +
         place(column);
}

// A warp calls it and receives a lane's first `count` fours of words, each from `offset` of its
// index on; the others are anything. What has arrived is not loaded again: all blocks read the same
// words, and this traffic would delay the ones that are still missing. The tags are taken off: they
// differ from launch to launch, the results must not.
template <int COUNT, class Offset>
__device__ __forceinline__ void receive(uint4 (&words)[COUNT], int count, uint32_t tag,
                                        const float* data, Offset offset) {
  const uint32_t tags = 0u - tag;
  const uint32_t wanted = (1u << min(count, COUNT)) - 1;  // a bit for each four
  uint32_t missing = wanted;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) words[i] = {0, 0, 0, 0};
#pragma unroll 1
  while (__any_sync(0xffffffffu, missing)) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) ld_relaxed_128(words[i], data + offset(i), missing >> i & 1);
    missing = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const uint4& w = words[i];
      const uint32_t wrong = (w.x ^ tags) | (w.y ^ tags) | (w.z ^ tags) | (w.w ^ tags);
      missing |= (wrong & 1) << i;
    }
    missing &= wanted;
  }
#pragma unroll
  for (uint4& w : words) w = {w.x & ~1u, w.y & ~1u, w.z & ~1u, w.w & ~1u};
}

// The numbers of a lane that `receive` has got, COUNT from the four `first` on.
template <int COUNT, int FOURS>
__device__ __forceinline__ void to_floats(float (&values)[COUNT], const uint4 (&words)[FOURS],
                                          int first) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const uint4& four = words[first + i / 4];
    values[i] = __uint_as_float(four.x), values[i + 1] = __uint_as_float(four.y);
    values[i + 2] = __uint_as_float(four.z), values[i + 3] = __uint_as_float(four.w);
  }
}
