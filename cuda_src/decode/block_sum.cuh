// Sums of integers and comparisons over a whole block of 1024 threads.
#pragma once
#include "../common/group_sum.cuh"

constexpr int BLOCK = 1024;

// The larger logit, and the first of equal ones. The caller represents NaN by infinity.
struct Largest {
  float logit;
  int index;
};

__device__ __forceinline__ Largest operator+(Largest a, Largest b) {
  const bool second = b.logit > a.logit || (b.logit == a.logit && b.index < a.index);
  return second ? b : a;
}

template <class V>
__device__ __forceinline__ V block_sum(V value) {
  __shared__ V scratch[MAX_WARPS];
  __syncthreads();  // no thread reads the scratch of the last call any more
  return group_sum<BLOCK>(value, scratch);
}

// The sum over this lane and those before it.
__device__ __forceinline__ uint64_t warp_inclusive_sum(uint64_t value) {
#pragma unroll
  for (int delta = 1; delta < 32; delta *= 2) {
    const uint64_t before = __shfl_up_sync(0xffffffffu, value, delta);
    if (threadIdx.x % 32 >= delta) value += before;
  }
  return value;
}

// The sum over all threads before this one; `total` becomes the sum over all threads.
__device__ __forceinline__ uint64_t block_exclusive_sum(uint64_t value, uint64_t& total) {
  __shared__ uint64_t of_warps[MAX_WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint64_t inclusive = warp_inclusive_sum(value);
  __syncthreads();
  if (lane == 31) of_warps[warp] = inclusive;
  __syncthreads();
  const uint64_t warps = warp_inclusive_sum(of_warps[lane]);
  total = __shfl_sync(0xffffffffu, warps, 31);
  const uint64_t before = __shfl_sync(0xffffffffu, warps - of_warps[lane], warp);
  return before + inclusive - value;
}
