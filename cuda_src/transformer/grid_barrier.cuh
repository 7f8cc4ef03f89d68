// All blocks of a cooperative launch wait for each other, by one counter in global memory.
//
// In each round the arrivals add up to 2^31: 1 of every block, and of block 0 what then is missing.
// So the upper bit flips with the last arrival and not before, the counter needs no reset, and
// after an even number of rounds it is 0 again. A block arrives only after it has waited for the
// round before: a second arrival in the same round would be counted as another block's.
#pragma once
#include "../ptx/atomics.cuh"

class GridBarrier {
 public:
  __device__ explicit GridBarrier(uint32_t* counter) : counter_(counter) {}

  // By one thread, after the others of its block have synchronised with it: releases their writes.
  __device__ void arrive() const {
    red_add_release(counter_, blockIdx.x == 0 ? FLIP - (gridDim.x - 1) : 1);
  }

  // By that thread, after the arrival of round 1, 2, ...: acquires what all blocks have written.
  // The others must synchronise with it.
  __device__ void wait(int round) const {
    const uint32_t done = round % 2 ? FLIP : 0;
    while ((load_acquire(reinterpret_cast<const int*>(counter_)) & FLIP) != done) {
    }
  }

 private:
  static constexpr uint32_t FLIP = 0x80000000u;
  uint32_t* counter_;
};
