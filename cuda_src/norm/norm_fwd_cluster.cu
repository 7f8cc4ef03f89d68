// The forward of LayerNorm and RMSNorm for longer rows (sm_90): the blocks of a cluster share a
// row. The algorithm is in norm_fwd_rows.cuh.
#include "norm_fwd_rows.cuh"

template <typename T, typename WEIGHT, bool RMS, int CLUSTER, int NUM_THREADS, int LOADS,
          int VECTOR, int BLOCKS>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(NUM_THREADS, BLOCKS)
    norm_fwd_cluster(const __grid_constant__ NormFwdParams params) {
  norm_fwd_rows<RowTile<NUM_THREADS, LOADS, VECTOR, NUM_THREADS>, CLUSTER, false, RMS, T, WEIGHT>(
      params);
}
