// out = the sum of the slots of each row, of up to ARRAYS arrays: gradients that several ranks have
// written (put_rows.cu). They are added in float32 in the order of the slots, and rounded once, so
// that the result is always the same. A row without slots becomes 0.
//
// A warp has a row; a lane has VECTOR neighbouring columns of it at a time.
#include "../common/convert.cuh"
#include "../common/pack.cuh"
#include "params.cuh"

constexpr int THREADS = 256;

template <typename T, int VECTOR>
__global__ void __launch_bounds__(THREADS) sum_rows(const __grid_constant__ SumRowsParams params) {
  const int64_t row = int64_t(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  if (row >= params.rows) return;
  const int64_t first = params.parts[3 * row];
  const int count = params.parts[3 * row + 1], step = params.parts[3 * row + 2];

  for (int i = 0; i < ARRAYS; ++i) {
    const SumArray& array = params.arrays[i];
    const int64_t width = array.width;
    const T* slots = static_cast<const T*>(array.slots) + first * width;
    T* out = static_cast<T*>(array.out) + row * width;
    for (int64_t column = threadIdx.x % 32 * VECTOR; column < width; column += 32 * VECTOR) {
      float sums[VECTOR] = {};
      for (int slot = 0; slot < count; ++slot) {
        const auto pack = load_pack<VECTOR>(slots + int64_t(slot) * step * width + column);
#pragma unroll
        for (int n = 0; n < VECTOR; ++n) sums[n] += to_float(pack.values[n]);
      }
      Pack<T, VECTOR> pack;
#pragma unroll
      for (int n = 0; n < VECTOR; ++n) pack.values[n] = from_float<T>(sums[n]);
      store_pack<VECTOR>(out + column, pack);
    }
  }
}
