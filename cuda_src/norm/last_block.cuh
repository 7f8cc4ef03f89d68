// The block that is done last does what needs all of them, without anyone waiting.
#pragma once
#include "../ptx/atomics.cuh"

// Whether `count` - 1 other blocks have got here before this one, by all threads of a block. What
// they wrote before is visible then. *counter is 0 before the first of them and after the last.
__device__ __forceinline__ bool is_last_block(int* counter, int count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = count_in(counter, count - 1) == count - 1;
  __syncthreads();
  return last;
}
