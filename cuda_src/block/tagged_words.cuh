// Tagged words, by which blocks exchange numbers without a barrier. Each is a float whose lowest
// bit is a tag, which flips whenever the number is replaced. A reader loads a word until its tag is
// that of the round that it wants, and so has the number as soon as it is in L2, without the two
// round trips of a barrier before.
//
// One bit is enough. Every block has rows of every matrix, so each block reads every round of a
// vector, and the numbers that it computes from them are needed, directly or not, before any number
// of that vector is replaced. So a word belongs to the round that a reader wants, or to the one
// before. The rounds go on from launch to launch, so each launch replaces all words that exist,
// also those that no block reads.
#pragma once
#include "../ptx/relaxed.cuh"
#include "params.cuh"

// The place of a column in a vector: bits 2 and 3 of its number are exchanged. A lane reads eight
// columns by two loads of 16 bytes, and in this order each load of two lanes is a whole sector of
// 32 bytes. A vector has row_words() words.
__device__ __forceinline__ int place(int column) {
  return (column & ~12) | (column & 4) << 1 | (column & 8) >> 1;
}
constexpr int NEXT_FOUR = 8;  // words from a lane's first load to its second
__host__ __device__ constexpr int row_words(int columns) { return round_up(columns, 16); }

__device__ __forceinline__ float tagged(float value, uint32_t tag) {
  return __uint_as_float((__float_as_uint(value) & ~1u) | tag);
}
__device__ __forceinline__ float untagged(float word) { return tagged(word, 0); }
__device__ __forceinline__ void send(float* word, float value, uint32_t tag) {
  st_relaxed(word, tagged(value, tag));
}

// All blocks read the same vectors, and L2 serves many requests for one word one after the other.
// So there are several copies of these vectors, and a block reads one of them.
template <int SEQUENCES>
constexpr int COPIES = MAX_BATCH / SEQUENCES;
template <int SEQUENCES>
__device__ __forceinline__ int own_copy() {
  return blockIdx.x % COPIES<SEQUENCES>;
}

// The address of a column of the n-th vector, in one of its copies.
__device__ __forceinline__ float* residual_word(const DecodeStackParams& params, int copy, int n,
                                                int column) {
  return params.residual + copy * params.copy_words + n * row_words(params.width) + place(column);
}
__device__ __forceinline__ float* hidden_word(const DecodeStackParams& params, int copy, int n,
                                              int column) {
  return params.hidden + copy * params.copy_words + int64_t(n) * row_words(params.hidden_width) +
         place(column);
}

// Receives the first `count` groups of four words for each lane of a warp; group i begins at
// data + offset(i). The contents of the other groups are undefined. Groups that have arrived are
// not loaded again, because that traffic would delay the words that are still missing. The tags are
// removed, because they differ from launch to launch, and the results must not.
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

// COUNT numbers of those that receive() has returned, from group `first` on.
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
