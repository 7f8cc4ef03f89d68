// The block that is done last does what needs all of them, without anyone waiting.
#pragma once
#include "../ptx/atomics.cuh"

// For up to 32 counters, by all threads of a block: bit i is whether count_of(i) - 1 other blocks
// have counted by *counter_of(i) before this one. What they wrote before is visible then. A counter
// is 0 before the first of them and after the last.
template <class CounterOf, class CountOf>
__device__ __forceinline__ unsigned last_block_of(int number, CounterOf counter_of,
                                                  CountOf count_of) {
  __shared__ unsigned result;
  __syncthreads();
  const int i = threadIdx.x;
  if (i < 32) {
    bool last = false;
    if (i < number) {
      const int others = count_of(i) - 1;
      last = count_in(counter_of(i), others) == others;
    }
    const unsigned all = __ballot_sync(0xffffffffu, last);
    if (i == 0) result = all;
  }
  __syncthreads();
  return result;
}
