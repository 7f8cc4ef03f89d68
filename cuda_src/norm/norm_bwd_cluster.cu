// The backward of LayerNorm and RMSNorm for longer rows (sm_90): the blocks of a cluster share a
// row, each has a piece of its columns. The algorithm is in norm_bwd_rows.cuh; sum_partials adds up
// the partial sums of dweight and dbias afterwards.
#include "norm_bwd_rows.cuh"

template <typename T, typename WEIGHT, bool RMS, int CLUSTER, int NUM_THREADS, int LOADS,
          int VECTOR, int STAGES>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(NUM_THREADS, 1)
    norm_bwd_cluster(const __grid_constant__ NormBwdParams params) {
  extern __shared__ __align__(16) char smem[];
  norm_bwd_rows<RowTile<NUM_THREADS, LOADS, VECTOR, NUM_THREADS>, T, WEIGHT, RMS, CLUSTER, STAGES>(
      params, smem);
}
