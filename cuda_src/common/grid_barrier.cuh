// All blocks of a cooperative launch wait for each other, once in a launch.
#pragma once
#include "../ptx/atomics.cuh"

// By one thread of each block, synchronised with the others before and after: what any thread wrote
// before is visible to all threads after. *counter is 0 before the launch and after it: blocks
// count themselves in, and out again; the last one out brings it back to 0. Nobody waits for the
// counting out.
__device__ __forceinline__ void wait_for_all_blocks(int* counter) {
  const int blocks = gridDim.x;
  release_flag_wrapping(counter, 2 * blocks - 1);
  // It can only be 0 again after this block has counted itself out.
  while (load_acquire(counter) < blocks) {
  }
  count_wrapping(counter, 2 * blocks - 1);
}

__device__ __forceinline__ void grid_barrier(int* counter) {
  __syncthreads();
  if (threadIdx.x == 0) wait_for_all_blocks(counter);
  __syncthreads();
}
