// whole_mlp.cuh in clusters of two blocks.
#include "whole_mlp.cuh"

template <typename T, Activation ACTIVATION, bool GATED, int ROWS, int VECTOR, int NUM_STAGES,
          int ARCH, int SMEM_BYTES>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(SMALL_M_THREADS, 1)
    mlp_small_m_cluster(const __grid_constant__ MlpParams params) {
  extern __shared__ __align__(128) char smem[];
  whole_mlp<SmallMTile<T, ROWS, VECTOR, NUM_STAGES, ARCH>, ACTIVATION, GATED, 2>(params, smem);
}
