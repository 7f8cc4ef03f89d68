// The rotary embedding of q and k, in place in the out of a projection whose kernel did not compute
// it. Each thread rotates one pair of numbers, and no other thread reads or writes them.
#include "epilogue.cuh"

constexpr int THREADS = 256;

template <typename T>
__global__ void __launch_bounds__(THREADS)
    rotary_embedding(const __grid_constant__ LinearParams params) {
  const Rotary& rotary = params.rotary;
  const int half = rotary.rotary_dim / 2;
  const int pairs = rotary.columns / rotary.head_dim * half;  // of a row
  const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t row = index / pairs;
  if (row >= params.rows) return;
  const int of_row = int(index - row * pairs), pair = of_row % half;
  const int head = of_row / half * rotary.head_dim;
  T* out = static_cast<T*>(params.out) + row * params.out_stride + head;
  T& first = out[rotary.interleaved ? 2 * pair : pair];
  T& second = out[rotary.interleaved ? 2 * pair + 1 : pair + half];
  float a = to_float(first), b = to_float(second);
  RowRotation<T>(params, row)(pair, a, b);
  first = from_float<T>(a);
  second = from_float<T>(b);
}
