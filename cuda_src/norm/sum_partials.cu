// Adds up the partial sums of dweight and dbias (sum_shares.cuh), where the kernel that wrote them
// has no barrier of all blocks.
#include "sum_shares.cuh"

template <typename WEIGHT, int WARPS>
__global__ void __launch_bounds__(WARPS * 32)
    sum_partials(const __grid_constant__ SumPartialsParams params) {
  sum_shares<WEIGHT, WARPS>(params, blockIdx.x);
}
