// group_fwd.cuh, where the blocks of a cluster share a group.
#include "group_fwd.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, int CLUSTER, int ROW_THREADS,
          int LOADS, int VECTOR, int BLOCKS>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(ROW_THREADS, BLOCKS)
    group_norm_fwd_cluster(const __grid_constant__ GroupNormFwdParams params) {
  group_fwd<RowTile<ROW_THREADS, LOADS, VECTOR>, CLUSTER, first, ACTIVATION, T, WEIGHT>(params);
}
