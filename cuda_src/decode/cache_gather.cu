// Copies the keys and values of sequences out of a cache of pages (paged_rows.cuh), for kernels
// that do not read pages: row i of sequence b becomes key starts[b] + i. A cache of 8 bits (KIND)
// is multiplied by its scales, and rounded to T.
//
// Each thread has VECTOR neighbouring columns of a head of a row of k and of v. Rows behind the
// last key are not written.
#include "../common/convert.cuh"
#include "../common/pack.cuh"
#include "narrow.cuh"
#include "params.cuh"

constexpr int THREADS = 256;

template <typename T, int KIND, int VECTOR>
__device__ void get(T* to, const void* cache, int64_t from, const float* scale) {
  if constexpr (KIND == SAME) {
    store_pack<VECTOR>(to, load_pack<VECTOR>(static_cast<const T*>(cache) + from));
  } else {
    const auto narrow = load_pack<VECTOR>(static_cast<const uint8_t*>(cache) + from);
    Pack<T, VECTOR> pack;
    for (int i = 0; i < VECTOR; ++i)
      pack.values[i] = from_float<T>(from_narrow<KIND>(narrow.values[i]) * *scale);
    store_pack<VECTOR>(to, pack);
  }
}

template <typename T, int KIND, int VECTOR>
__global__ void __launch_bounds__(THREADS)
    cache_gather(const __grid_constant__ CacheGatherParams params) {
  // ---- which columns ----
  const int vectors = ceil_div(params.head_dim, VECTOR);
  int64_t item = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  const int column = item % vectors * VECTOR;
  const int64_t to = item / vectors * params.head_dim + column;
  item /= vectors;
  const int head = item % params.heads;
  item /= params.heads;
  const int batch = item / params.max_length;
  if (batch >= params.batch) return;
  const int64_t key =
      item - int64_t(batch) * params.max_length + (params.starts ? params.starts[batch] : 0);
  if (key < 0 || key >= min(params.lengths[batch], params.pages.capacity)) return;

  // ---- copy ----
  const RowPlace at = place_of(params, batch, key);
  const int page = params.pages.existing(at.page);
  get<T, KIND, VECTOR>(static_cast<T*>(params.k) + to, params.k_cache,
                       params.k_cache_strides.at(page, at.row, head) + column,
                       params.k_scale + params.k_scale_strides.at(page, at.row, head));
  get<T, KIND, VECTOR>(static_cast<T*>(params.v) + to, params.v_cache,
                       params.v_cache_strides.at(page, at.row, head) + column,
                       params.v_scale + params.v_scale_strides.at(page, at.row, head));
}
