// The gradients of weight and bias from the partial sums of all blocks.
#pragma once
#include "../common/convert.cuh"
#include "../ptx/ld_global.cuh"
#include "params.cuh"

// Adds up the rows of 32 columns of one of the two matrices, in an order that never changes: the
// rows are dealt out to the WARPS warps of a block, then the first warp adds up their sums from
// shared memory. Chunks of 32 columns are numbered through both matrices. A block that calls this
// again needs a barrier between, as the sums of the first call may still be read.
template <typename WEIGHT, int WARPS>
__device__ __forceinline__ void sum_shares(const SumPartialsParams& params, int chunk) {
  const int chunks = int((params.columns + 31) / 32);
  const int which = chunk >= chunks;
  const int column = (chunk - which * chunks) * 32 + threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const float* partials = params.partials + (which * params.rows + warp) * params.columns + column;
  const uint32_t rows = column < params.columns ? uint32_t(params.rows) : 0;
  float sum = 0.f;
  // Loads in flight: enough for one partial sum of each block of an H200 in one step.
  constexpr int AT_ONCE = WARPS > 8 ? 12 : 24;
#pragma unroll 1
  for (uint32_t first = warp; first < rows; first += AT_ONCE * WARPS) {
    float shares[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      shares[i] = first + i * WARPS < rows ? ld_global_cg(partials) : 0.f;
      partials += WARPS * params.columns;
    }
#pragma unroll
    for (float share : shares) sum += share;
  }
  __shared__ float sums[WARPS][32];
  sums[warp][threadIdx.x % 32] = sum;
  __syncthreads();
  if (warp > 0 || column >= params.columns) return;
#pragma unroll
  for (int i = 1; i < WARPS; ++i) sum += sums[i][threadIdx.x];
  static_cast<WEIGHT*>(which ? params.second : params.first)[column] = from_float<WEIGHT>(sum);
}
