// All blocks of a cooperative launch wait for each other, once in a launch.
#pragma once
#include "../ptx/atomics.cuh"

// What any thread wrote before is visible to all threads after. *counter is 0 before the launch and
// after it: blocks count themselves in, and out again; the last one out puts it back.
__device__ __forceinline__ void grid_barrier(int* counter) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const int blocks = gridDim.x;
    release_flag(counter);
    while (load_acquire(counter) < blocks) {
    }
    if (atomicAdd(counter, 1) == 2 * blocks - 1) atomicExch(counter, 0);
  }
  __syncthreads();
}
