// The first step: out = a + b. Each thread computes the number at its own place.
#include "../common/convert.cuh"
#include "params.cuh"

template <typename T>
__global__ void vector_add(const __grid_constant__ VectorAddParams params) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= params.size) return;  // the last block may be larger than what is left
  const float a = to_float(static_cast<const T*>(params.a)[i]);
  const float b = to_float(static_cast<const T*>(params.b)[i]);
  static_cast<T*>(params.out)[i] = from_float<T>(a + b);
}
