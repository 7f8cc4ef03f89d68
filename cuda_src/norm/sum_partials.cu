// Gradients of weight and bias from the shares of the blocks before: sums over the rows of one or
// two matrices, in an order that never changes. A block has 32 columns; its warps take the rows in
// turn and add up in shared memory.
#include "../common/convert.cuh"
#include "../common/norm_params.cuh"

constexpr int WARPS = 32;

template <typename WEIGHT>
__global__ void __launch_bounds__(WARPS * 32)
    sum_partials(const __grid_constant__ SumPartialsParams params) {
  const int64_t blocks = (params.columns + 31) / 32;
  const int64_t column = blockIdx.x % blocks * 32 + threadIdx.x % 32;
  const int64_t which = blockIdx.x / blocks;
  const int warp = threadIdx.x / 32;
  const float* partials = params.partials + which * params.rows * params.columns + column;
  float sum = 0.f;
  if (column < params.columns) {
#pragma unroll 4
    for (int64_t row = warp; row < params.rows; row += WARPS) sum += partials[row * params.columns];
  }
  __shared__ float sums[WARPS][32];
  sums[warp][threadIdx.x % 32] = sum;
  __syncthreads();
  if (warp > 0 || column >= params.columns) return;
  for (int i = 1; i < WARPS; ++i) sum += sums[i][threadIdx.x];
  static_cast<WEIGHT*>(which ? params.second : params.first)[column] = from_float<WEIGHT>(sum);
}
