// The loaders of K and V in pages (key_pages.cuh): a warp for each, of which every lane reads the
// entry of the table for one box of a tile, a tile ahead. One lane then copies all boxes, whose
// places are those of the one before them a few rows on.
//
// 0 * NaN is NaN, so no row of V that the sequence does not own may reach a product, although the
// mask hides it. Its first page may have such rows before the window, and its last one behind the
// length: these pages have maps of their own (sequence_maps_sm90.cu), outside of which the copy
// engine reads zeros. So it does for pages that no query sees, and for entries of the table that
// are no pages: their coordinate is -1. Such rows of K give scores that the mask replaces.
#pragma once
#include "fwd_block.cuh"

// K or V of the sequence of one query tile.
template <RowsMap WHICH>
struct TilePages {
  const PagesOfKeys& pages;
  const int* table;  // of the sequence
  SeenPages seen;
  const TensorMap* all;
  const TensorMap* first;  // the map of its first page of V
  const TensorMap* last;

  template <class Params>  // FlashFwdSm90Params
  __device__ TilePages(const Params& params, const FwdTile& tile)
      : pages(params),
        table(pages.table + tile.batch * pages.rows.table_stride),
        seen(pages.rows, tile.sequence),
        all(&params.q_map + static_cast<int>(WHICH)) {
    if constexpr (WHICH == RowsMap::V) {
      const TensorMap* maps = params.sequence_maps + tile.batch;
      first = maps + static_cast<int>(FIRST_PAGE_OF_V) * params.base.shape.batch;
      last = maps + static_cast<int>(LAST_PAGE_OF_V) * params.base.shape.batch;
      tensor_map_acquire(*first);
      tensor_map_acquire(*last);
    }
  }

  // The entry of a key's page. Its caller does not look at it before it copies, so that the load
  // is under way meanwhile.
  __device__ int entry_of(int key) const {
    const int number = pages.rows.page_of(key);
    return number >= seen.first && number <= seen.last ? table[number] : -1;
  }

  // Copies the column blocks of a box in a page, which is -1 if there is none, and its number.
  template <class Tile>
  __device__ void load(uint32_t dst, uint32_t barrier, int number, int page, int row,
                       int head) const {
    const TensorMap* map = all;
    if constexpr (WHICH == RowsMap::V) {
      if (number == seen.last) map = last;
      if (number == seen.first && seen.first_row > 0) {
        map = first;
        row -= seen.first_row;
      }
    }
#pragma unroll
    for (int block = 0; block < Tile::NUM_BLOCKS; ++block) {
      tma_load(dst + block * Tile::BLOCK_BYTES, *map, barrier, block * 64, row, head, page);
    }
  }
};

template <RowsMap WHICH, class Params, class L>
__device__ __forceinline__ void load_paged_keys(const Params& params, FwdShared<L>& shared,
                                                uint32_t smem) {
  constexpr bool IS_K = WHICH == RowsMap::K;
  using TileKV = typename Choose<IS_K, typename L::TileK, typename L::TileV>::Type;
  const AttentionShape& shape = params.base.shape;
  const int lane = threadIdx.x % 32;
  const int box_rows = params.box_rows, lane_row = lane * box_rows;
  auto& barriers = IS_K ? shared.k : shared.v;
  smem += IS_K ? L::K_OFFSET : L::V_OFFSET;
  Ring<FWD_TILE_RECORDS> record;
  Ring<L::KV_STAGES> ring;
#pragma unroll 1
  for (;; record.advance()) {
    const FwdTile& tile = shared.wait_tile(record);
    if (tile.m_rows == 0) return;
    const TilePages<WHICH> pages(params, tile);
    const int head_kv = tile.head / (shape.heads_q / shape.heads_kv);
    const int n_begin = tile.n_range.begin;
    int n = tile.n_range.end - 1;
    const int n_almost = min(n, n_begin + LOOK_AHEAD);
    if (n < n_begin && lane == 0) mbarrier_arrive(smem_address(&shared.almost_loaded));
    int entry = pages.entry_of(max(n, 0) * L::BLOCK_N + lane_row);
#pragma unroll 1
    for (; n >= n_begin; --n, ring.advance()) {
      const int next_entry = pages.entry_of(max(n - 1, 0) * L::BLOCK_N + lane_row);
      if (n == n_almost && lane == 0) mbarrier_arrive(smem_address(&shared.almost_loaded));
      barriers.wait_empty(ring);
      const uint32_t full = smem_address(&barriers.full[ring.stage]);
      if (lane == 0) mbarrier_arrive_expect(full, TileKV::BYTES);
      __syncwarp();  // the barrier knows of the bytes
      const int lane_page = params.rows.has(entry) ? entry : -1;
      int page = __shfl_sync(0xffffffffu, lane_page, 0);
      int number = params.rows.page_of(n * L::BLOCK_N);
      int row = n * L::BLOCK_N - number * params.rows.page_size;
#pragma unroll 4
      for (int i = 0; i * box_rows < L::BLOCK_N; ++i) {
        const int next_page = __shfl_sync(0xffffffffu, lane_page, i + 1);  // on its way early
        const uint32_t to = smem + ring.stage * TileKV::BYTES + i * box_rows * TileKV::ROW_BYTES;
        if (elect_one()) pages.template load<TileKV>(to, full, number, page, row, head_kv);
        row += box_rows;
        if (row >= params.rows.page_size) ++number, row = 0;
        page = next_page;
      }
      entry = next_entry;
    }
    __syncwarp();  // all lanes have read the record
  }
}
