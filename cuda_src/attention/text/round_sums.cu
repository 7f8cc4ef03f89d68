// The gradient of a capture from exact sums, behind the kernel that adds to these. A thread has one
// element.
#include "exact_sum.cuh"

struct RoundSumsParams {
  const ExactSum* sums;
  float* gradient;
  int64_t size;
};

template <int NUM_THREADS>
__global__ void __launch_bounds__(NUM_THREADS)
    round_sums(const __grid_constant__ RoundSumsParams params) {
  const int64_t i = int64_t(blockIdx.x) * NUM_THREADS + threadIdx.x;
  if (i < params.size) params.gradient[i] = rounded(params.sums[i]);
}
