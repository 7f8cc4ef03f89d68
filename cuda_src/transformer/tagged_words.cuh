// How blocks tell each other numbers without waiting for each other first: as floats whose lowest
// bit is a tag, which flips whenever a number is replaced. A reader loads until the tags are those
// of the round that it wants, and so has the number as soon as it is in L2, without the two trips
// of a barrier before.
//
// One bit is enough. Every block has rows of every matrix, so each reads every round of a vector,
// and what it writes then is needed, directly or not, before any number of that vector is replaced:
// a number is of the round that a reader wants, or of the one before.
#pragma once
#include "../ptx/relaxed.cuh"

__device__ __forceinline__ void send(float* word, float value, uint32_t tag) {
  st_relaxed(word, __uint_as_float((__float_as_uint(value) & ~1u) | tag));
}

// By a warp: the first `count` of the fours of words, each from `offset` of its index on, for lanes
// where it is `valid`; elsewhere they are anything.
template <int COUNT, class Offset, class Valid>
__device__ __forceinline__ void receive(uint4 (&words)[COUNT], int count, uint32_t tag,
                                        const float* data, Offset offset, Valid valid) {
  const uint32_t tags = 0u - tag;
  uint32_t wrong;
#pragma unroll 1
  do {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      uint4 w = {0, 0, 0, 0};
      if (i < count && valid(i)) w = ld_relaxed_128(data + offset(i));
      words[i] = w;
    }
    wrong = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const uint4& w = words[i];
      if (i < count && valid(i)) wrong |= (w.x ^ tags) | (w.y ^ tags) | (w.z ^ tags) | (w.w ^ tags);
    }
  } while (__any_sync(0xffffffffu, wrong & 1));
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
