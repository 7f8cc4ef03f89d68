// group_bwd.cuh, where a block has whole groups.
#include "group_bwd.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, Layout LAYOUT, int ROW_THREADS,
          int LOADS, int VECTOR, int BLOCKS>
__global__ void __launch_bounds__(block_threads(ROW_THREADS), BLOCKS)
    group_norm_bwd(const __grid_constant__ GroupNormBwdParams params) {
  group_bwd<RowTile<ROW_THREADS, LOADS, VECTOR>, LAYOUT, ACTIVATION, T, WEIGHT>(params);
}
