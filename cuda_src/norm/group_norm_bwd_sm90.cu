// group_bwd.cuh, where the blocks of a cluster share a group.
#include "group_bwd.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, int CLUSTER, int ROW_THREADS,
          int LOADS, int VECTOR, int BLOCKS>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(ROW_THREADS, BLOCKS)
    group_norm_bwd_sm90(const __grid_constant__ GroupNormBwdParams params) {
  group_bwd<RowTile<ROW_THREADS, LOADS, VECTOR>, CLUSTER, first, ACTIVATION, T, WEIGHT>(params);
}
