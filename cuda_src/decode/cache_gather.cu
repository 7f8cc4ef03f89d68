// Copies the keys and values of sequences out of a cache of pages (paged_rows.cuh), for kernels
// that do not read pages: row i of sequence b becomes key starts[b] + i. A cache of 8 bits (KIND)
// is multiplied by its scales, and rounded to T.
//
// A block has ITEMS neighbouring items of a sequence, of which each thread takes some in turn; an
// item is VECTOR neighbouring columns of a head of a row, of k and of v. Rows behind the last key
// are not written, and a block that has only such rows ends at once. Divisions of 64 bits, which
// would cost more than an item, are made once a block.
#include "../common/convert.cuh"
#include "../common/pack.cuh"
#include "narrow.cuh"
#include "params.cuh"

constexpr int THREADS = 256;
constexpr int ITEMS = 4 * THREADS;

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
  // ---- which items ----
  const int vectors = ceil_div(params.head_dim, VECTOR), per_row = params.heads * vectors;
  const int batch = blockIdx.x / params.blocks;
  const int64_t first = int64_t(blockIdx.x - batch * params.blocks) * ITEMS;
  const int64_t first_row = first / per_row;
  const int start = params.starts ? params.starts[batch] : 0;
  const int end = min(params.lengths[batch], params.pages.capacity);
  if (start < 0 || start + first_row >= end) return;

  // ---- copy ----
#pragma unroll
  for (int i = 0; i < ITEMS; i += THREADS) {
    const int item = first - first_row * per_row + i + threadIdx.x, row = item / per_row;
    const int head = (item - row * per_row) / vectors;
    const int column = (item - row * per_row - head * vectors) * VECTOR;
    const int64_t key = start + first_row + row;
    if (key >= end) return;
    const RowPlace at = place_of(params, batch, key);
    const int page = params.pages.existing(at.page);
    const int64_t to_row = int64_t(batch) * params.max_length + first_row + row;
    const int64_t to = (to_row * params.heads + head) * params.head_dim + column;
    get<T, KIND, VECTOR>(static_cast<T*>(params.k) + to, params.k_cache,
                         params.k_cache_strides.at(page, at.row, head) + column,
                         params.k_scale + params.k_scale_strides.at(page, at.row, head));
    get<T, KIND, VECTOR>(static_cast<T*>(params.v) + to, params.v_cache,
                         params.v_cache_strides.at(page, at.row, head) + column,
                         params.v_scale + params.v_scale_strides.at(page, at.row, head));
  }
}
