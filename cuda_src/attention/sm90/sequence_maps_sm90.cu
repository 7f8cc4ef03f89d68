// Prepares the sm_90 kernels for sequences with lengths of their own, packed or padded: it writes
// sequence_maps [map][batch] and packed_tiles. One block handles one sequence.
//
// Tensor maps. Each warp copies one of the maps of all rows (of q, k, v, and out or dout) and lets
// it end where the sequence ends, so that TMA reads zeros past the end and writes nothing there.
// Without these maps a tile would read rows of the next sequence, and 0 * NaN is NaN. With keys in
// pages (paged_keys.cuh), the places of K and V have maps of V: of the rows that are seen in the
// first page that any query sees, and in the last one.
//
// The list of tiles that exist, for TileOrder (tile_order.cuh). Each block counts the tiles of all
// sequences that are longer than its own, and so finds the place of its own tiles. Blocks write to
// different places and do not wait for each other.
//
// PTX ISA: "tensormap.replace", "membar / fence: fence.proxy.tensormap".
#include "../tensor_rows.cuh"

// Lets a map of all pages of V have those rows of a page that are seen in the first one, or the
// last.
__device__ __forceinline__ void limit_to_page(const PagesOfKeys& pages, const Sequence& sequence,
                                              bool first, TensorMap& map) {
  const SeenPages seen(pages.rows, sequence);
  int rows = seen.last_rows;
  if (first) {
    if (seen.first != seen.last) rows = pages.rows.page_size;
    rows -= seen.first_row;
    tensor_map_set_address(map,
                           static_cast<const char*>(pages.v) + seen.first_row * pages.v_row_bytes);
  }
  tensor_map_set_rows(map, uint32_t(max(0, rows)));
}

template <class Params>  // which is SequenceMapsParams
__device__ __forceinline__ void make_map(const Params& params, TensorMap& shared) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const bool of_keys = warp == 1 || warp == 2;
  const Sequence sequence = load_sequence(params, blockIdx.x);
  const int64_t end =
      of_keys ? sequence.start_k + sequence.seqlen_k : sequence.start_q + sequence.seqlen_q;
  uint32_t* map = reinterpret_cast<uint32_t*>(&shared);
  const int copied = HAS_PAGES && of_keys ? static_cast<int>(RowsMap::V) : warp;
  map[lane] = reinterpret_cast<const uint32_t*>(&params.maps[copied])[lane];
  __syncwarp();  // the map is copied
  if (lane == 0) tensor_map_set_rows(shared, uint32_t(end));
  if constexpr (HAS_PAGES) {
    const bool first = static_cast<RowsMap>(warp) == FIRST_PAGE_OF_V;
    if (of_keys && lane == 0) limit_to_page(params, sequence, first, shared);
  }
  __syncwarp();  // the map ends where the sequence ends
  TensorMap* out = params.sequence_maps + warp * gridDim.x + blockIdx.x;
  reinterpret_cast<uint32_t*>(out)[lane] = map[lane];
}

__device__ __forceinline__ void list_tiles(const SequenceMapsParams& params) {
  __shared__ int shared_before, shared_total;
  if (threadIdx.x == 0) shared_before = shared_total = 0;
  __syncthreads();  // the counts are 0
  const auto length = [&](int i) {
    const Sequence sequence = load_sequence(params, i);
    return params.tiles_of_keys ? sequence.seqlen_k : sequence.seqlen_q;
  };
  const int own = blockIdx.x;
  const int own_length = length(own);
  int before = 0;
  int total = 0;
  for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
    const int its_length = length(i);
    const int tiles = ceil_div(its_length, params.tile_rows);
    total += tiles;
    if (its_length > own_length || (its_length == own_length && i < own)) before += tiles;
  }
  atomicAdd(&shared_before, before);
  atomicAdd(&shared_total, total);
  __syncthreads();  // the counts are complete
  PackedTile* list = params.packed_tiles;
  if (own == 0 && threadIdx.x == 0) list[0] = {0, min(shared_total, params.max_tiles)};
  // The list is written backwards, because its last element is computed first.
  const int tiles = ceil_div(own_length, params.tile_rows);
  const int last = shared_total - shared_before;
  for (int i = threadIdx.x; i < tiles; i += blockDim.x) {
    const int place = last - i;
    // Nothing is written outside of the list, even if the lengths do not fit the tensors.
    if (place >= 1 && place <= params.max_tiles) list[place] = {own, tiles - 1 - i};
  }
}

template <int NUM_MAPS>
__global__ void __launch_bounds__(NUM_MAPS * 32)
    sequence_maps_sm90(const __grid_constant__ SequenceMapsParams params) {
  static_assert(sizeof(params.maps) == NUM_MAPS * sizeof(TensorMap),
                "host and device disagree on the number of maps");
  __shared__ TensorMap maps[NUM_MAPS];
  make_map(params, maps[threadIdx.x / 32]);
  list_tiles(params);
}
