// A decode step of attention (flash_decode_step.cuh) in clusters of CLUSTER blocks (sm_90). They
// are for calls with so few sequences and heads that one block for each would leave most of the GPU
// idle.
#include "flash_decode_step.cuh"

template <typename T, int HEAD_DIM, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(DECODE_THREADS, 2)
    flash_decode_cluster(const __grid_constant__ FlashDecodeParams params) {
  decode_step<T, HEAD_DIM, CLUSTER, 90>(params);
}
