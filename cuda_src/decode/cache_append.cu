// Copies rows of keys and values to their places (sequence, position) in a cache. The rows may be
// slices of a wider tensor, such as a projection of q, k and v.
//
// Each thread has VECTOR neighbouring elements of k and of v, and shares nothing with others. A row
// whose place is outside of the cache, which the host cannot check, is not copied.
#include "../common/pack.cuh"
#include "params.cuh"

constexpr int THREADS = 256;

template <typename T, int VECTOR>
__global__ void __launch_bounds__(THREADS)
    cache_append(const __grid_constant__ CacheAppendParams params) {
  // ---- which elements ----
  const int64_t first = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * VECTOR;
  if (first >= params.rows * params.columns) return;
  const int64_t row = first / params.columns;
  const int column = first - row * params.columns;
  const int64_t sequence = params.sequences ? params.sequences[row] : row;
  const int position = params.positions[row];
  if (sequence < 0 || sequence >= params.batch || position < 0 || position >= params.max_length)
    return;

  // ---- copy ----
  const int64_t place = (sequence * params.max_length + position) * params.columns + column;
  const T* k = static_cast<const T*>(params.k) + row * params.k_stride + column;
  const T* v = static_cast<const T*>(params.v) + row * params.v_stride + column;
  store_pack<VECTOR>(static_cast<T*>(params.k_cache) + place, load_pack<VECTOR>(k));
  store_pack<VECTOR>(static_cast<T*>(params.v_cache) + place, load_pack<VECTOR>(v));
}
