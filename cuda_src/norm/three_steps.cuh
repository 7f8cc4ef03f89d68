// Groups that no block can hold are read twice, in three launches of one kernel: unit_blocks blocks
// of the first step share a unit (a group; with channels last a sample), a block of the second sums
// up for a unit (with channels last a warp for a group), and the third has the blocks of the first
// again, the last of them first: what they read lies in the L2 cache still.
#pragma once
#include "../common/types.cuh"

enum Step { collect, sum_up, apply };

// collect(unit, piece), sum_up(unit), apply(unit, piece).
template <Step STEP, class Collect, class SumUp, class Apply>
__device__ __forceinline__ void run_step(int unit_blocks, Collect collect, SumUp sum_up,
                                         Apply apply) {
  if constexpr (STEP == Step::sum_up) {
    sum_up(int(blockIdx.x));
  } else {
    const unsigned block = STEP == Step::collect ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const int unit = block / unsigned(unit_blocks);
    const int piece = block - unsigned(unit) * unit_blocks;
    if constexpr (STEP == Step::collect) {
      collect(unit, piece);
    } else {
      apply(unit, piece);
    }
  }
}
