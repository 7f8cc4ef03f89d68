// whole_mlp.cuh, every block on its own.
#include "whole_mlp.cuh"

template <typename T, Activation ACTIVATION, bool GATED, int ROWS, int VECTOR, int NUM_STAGES,
          int ARCH, int SMEM_BYTES>
__global__ void __launch_bounds__(SMALL_M_THREADS, 1)
    mlp_small_m(const __grid_constant__ MlpParams params) {
  extern __shared__ __align__(128) char smem[];
  whole_mlp<SmallMTile<T, ROWS, VECTOR, NUM_STAGES, ARCH>, ACTIVATION, GATED, 1>(params, smem);
}
