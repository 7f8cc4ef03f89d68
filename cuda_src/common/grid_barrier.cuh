// A barrier of all blocks of a cooperative launch, which can be used once in a launch.
#pragma once
#include "../ptx/atomics.cuh"

// One thread of each block calls this, between two __syncthreads() of its block. What any thread of
// the grid wrote before is then visible to all threads. *counter is 0 before and after the launch:
// every block counts itself in and out again, and the last of the 2 * gridDim.x counts wraps the
// counter to 0. No block waits for the counting out.
__device__ __forceinline__ void wait_for_all_blocks(int* counter) {
  const int blocks = gridDim.x;
  release_flag_wrapping(counter, 2 * blocks - 1);
  // The counter cannot wrap before this block has counted itself out, so the loop cannot miss it.
  while (load_acquire(counter) < blocks) {
  }
  count_wrapping(counter, 2 * blocks - 1);
}

__device__ __forceinline__ void grid_barrier(int* counter) {
  __syncthreads();  // all threads of this block have arrived
  if (threadIdx.x == 0) wait_for_all_blocks(counter);
  __syncthreads();  // all blocks have arrived
}
