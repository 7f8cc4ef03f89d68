// Copies rows of keys and values to their places in a cache of pages (paged_rows.cuh). A cache of 8
// bits (KIND) has scales, float32: what is written is the row divided by its scale, which is either
// given, or computed from the row and written to the cache of scales. Its divisions are rounded as
// IEEE 754 says, so every GPU and the reference write the same numbers.
//
// A place is a slot; or the key `positions[i]` of a sequence, where row i is of sequence i; or,
// with several rows of a sequence, the keys from positions[sequence] on. A warp has a head of a
// row, its lanes VECTOR neighbouring columns each; no warp shares anything with another. A row
// whose place is outside of the cache, which the host cannot check, is not copied.
//
// The next kernel may begin early (dependent_launch.cuh) if the cache has 8 bits. Else it could be
// flash_decode, which reads older keys at once: these.
#include "../common/convert.cuh"
#include "../common/pack.cuh"
#include "../common/warp.cuh"
#include "../ptx/dependent_launch.cuh"
#include "narrow.cuh"
#include "params.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// The sequence of a packed row: the last that begins at it or before it.
__device__ int sequence_of(const int* cu_seqlens, int batch, int64_t row) {
  int low = 0, high = batch;  // among low, …, high - 1
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (cu_seqlens[middle] <= row ? low : high) = middle;
  }
  return low;
}

// The place of a row, which is row `token` of sequence `batch` where these have as many rows each;
// page -1 if there is none.
__device__ RowPlace place_of_row(const CacheAppendParams& params, int64_t row, int64_t batch,
                                 int64_t token) {
  const PagedRows& pages = params.pages;
  const RowPlace none = {-1, 0};
  if (params.slots) {
    const int64_t slot = params.slots[row], end = int64_t(pages.num_pages) * pages.page_size;
    if (slot < 0 || slot >= end) return none;
    const int page = slot / pages.page_size;
    return {page, int(slot - int64_t(page) * pages.page_size)};
  }
  int64_t index = batch;
  if (params.cu_seqlens_q) {
    index = sequence_of(params.cu_seqlens_q, params.batch, row);
    token = row - params.cu_seqlens_q[index];
  } else if (params.tokens == 0) {
    index = row, token = 0;
  }
  const int64_t key = params.positions[index] + token;
  const int64_t sequence = params.sequences ? params.sequences[index] : index;
  if (key < 0 || key >= pages.capacity || sequence < 0 || sequence >= params.num_sequences)
    return none;
  if (!params.page_table) return {int(sequence), int(key)};
  const int number = pages.page_of(key);
  return {params.page_table[sequence * pages.table_stride + number],
          int(key) - number * pages.page_size};
}

// Writes a head of a row. All lanes of a warp call it.
template <typename T, int KIND, int VECTOR>
__device__ void put(const T* from, void* cache, int64_t to, float* scale, bool computes,
                    int head_dim) {
  const int first = threadIdx.x % 32 * VECTOR;
  if constexpr (KIND == SAME) {
    for (int column = first; column < head_dim; column += 32 * VECTOR)
      store_pack<VECTOR>(static_cast<T*>(cache) + to + column, load_pack<VECTOR>(from + column));
  } else {
    float size = computes ? 0.f : *scale;
    if (computes) {
      for (int column = first; column < head_dim; column += 32 * VECTOR) {
        const Pack<T, VECTOR> pack = load_pack<VECTOR>(from + column);
        for (int i = 0; i < VECTOR; ++i) size = fmaxf(size, fabsf(to_float(pack.values[i])));
      }
      size = __fdiv_rn(warp_max(size), KIND == INT8 ? LARGEST_INT8 : LARGEST_E4M3);
      if (threadIdx.x % 32 == 0) *scale = size;
      if (size == 0.f) size = 1.f;
    }
    for (int column = first; column < head_dim; column += 32 * VECTOR) {
      const Pack<T, VECTOR> pack = load_pack<VECTOR>(from + column);
      Pack<uint8_t, VECTOR> narrow;
      for (int i = 0; i < VECTOR; ++i)
        narrow.values[i] = to_narrow<KIND>(__fdiv_rn(to_float(pack.values[i]), size));
      store_pack<VECTOR>(static_cast<uint8_t*>(cache) + to + column, narrow);
    }
  }
}

template <typename T, int KIND, int VECTOR>
__global__ void __launch_bounds__(THREADS)
    cache_append(const __grid_constant__ CacheAppendParams params) {
  wait_for_previous_kernel();
  if constexpr (KIND != SAME) launch_next_kernel();
  // Warp blockIdx.x * WARPS + threadIdx.x / 32 of all has row * heads + head, without divisions of
  // 64 bits: `turns` are those of `heads` blocks, which have WARPS rows.
  const uint32_t heads = params.heads, turns = blockIdx.x / heads;
  const uint32_t rest = (blockIdx.x - turns * heads) * WARPS + threadIdx.x / 32;
  const int64_t row = int64_t(turns) * WARPS + rest / heads;
  const int head = rest % heads;
  if (row >= params.rows) return;
  const int64_t batch = params.tokens > 0 ? row / params.tokens : 0;
  const int64_t token = row - batch * params.tokens;
  const RowPlace at = place_of_row(params, row, batch, token);
  if (!params.pages.has(at.page)) return;

  const auto copy = [&](const void* from, const Strides& strides, void* cache,
                        const Strides& cache_strides, float* scale, const Strides& scale_strides) {
    put<T, KIND, VECTOR>(static_cast<const T*>(from) + strides.at(batch, token, head), cache,
                         cache_strides.at(at.page, at.row, head),
                         scale + scale_strides.at(at.page, at.row, head), params.computes_scales,
                         params.head_dim);
  };
  copy(params.k, params.k_strides, params.k_cache, params.k_cache_strides, params.k_scale,
       params.k_scale_strides);
  copy(params.v, params.v_strides, params.v_cache, params.v_cache_strides, params.v_scale,
       params.v_scale_strides);
}
