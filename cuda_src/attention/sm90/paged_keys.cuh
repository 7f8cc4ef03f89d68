// The loaders of K and V in pages (key_pages.cuh): a warp for each, of which every lane copies one
// box of a tile. So a tile takes one load from the table, which is made a tile ahead.
//
// 0 * NaN is NaN, so no row of V that the sequence does not own may reach a product, although the
// mask hides it. Its first page may have such rows before the window, and its last one behind the
// length: these pages have maps of their own (sequence_maps_sm90.cu), outside of which the copy
// engine reads zeros. So it does for pages that no query sees, and for entries of the table that
// are no pages: their coordinate is -1. Such rows of K give scores that the mask replaces.
#pragma once
#include "fwd_block.cuh"

// One box of a tile: where a lane reads it.
struct PagePiece {
  int number;  // of the page in the sequence
  int entry;   // of the table; it is not looked at before the copy, which its load thus precedes
  int row;     // in the page
};

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
  __device__ TilePages(const Params& params, const EveryFwdTile& tile)
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

  // The box that begins with this key.
  __device__ PagePiece at(int key) const {
    const int number = pages.rows.page_of(key);
    int entry = -1;
    if (number >= seen.first && number <= seen.last) entry = table[number];
    return {number, entry, key - number * pages.rows.page_size};
  }

  // Copies the column blocks of a box.
  template <class Tile>
  __device__ void load(uint32_t dst, uint32_t barrier, const PagePiece& piece, int head) const {
    const TensorMap* map = all;
    int row = piece.row;
    if constexpr (WHICH == RowsMap::V) {
      if (piece.number == seen.last) map = last;
      if (piece.number == seen.first && seen.first_row > 0) {
        map = first;
        row -= seen.first_row;
      }
    }
    const int page = pages.rows.has(piece.entry) ? piece.entry : -1;
#pragma unroll
    for (int block = 0; block < Tile::NUM_BLOCKS; ++block) {
      tma_load(dst + block * Tile::BLOCK_BYTES, *map, barrier, block * 64, row, head, page);
    }
  }
};

template <RowsMap WHICH, class Params, class L>
__device__ __forceinline__ void load_paged_keys(const Params& params, FwdShared<L>& shared,
                                                uint32_t smem) {
  static_assert(L::FROM_DIAGONAL || !L::INNER_APART, "every key tile is visited");
  constexpr bool IS_K = WHICH == RowsMap::K;
  using TileKV = typename Choose<IS_K, typename L::TileK, typename L::TileV>::Type;
  const AttentionShape& shape = params.base.shape;
  const int lane = threadIdx.x % 32;
  const int first_row = lane * params.box_rows;  // of the lane's box in a tile
  auto& barriers = IS_K ? shared.k : shared.v;
  smem += (IS_K ? L::K_OFFSET : L::V_OFFSET) + first_row * TileKV::ROW_BYTES;
  Ring<FWD_TILE_RECORDS> record;
  Ring<L::KV_STAGES> ring;
#pragma unroll 1
  for (;; record.advance()) {
    const typename L::Tile& tile = shared.wait_tile(record);
    if (tile.m_rows == 0) return;
    const TilePages<WHICH> pages(params, tile);
    const auto piece_of = [&](int n) {
      return pages.at(max(tile.key_tile(n), 0) * L::BLOCK_N + first_row);
    };
    const int head_kv = tile.head / (shape.heads_q / shape.heads_kv);
    const int n_begin = tile.n_range.begin;
    int n = tile.n_range.end - 1;
    const int n_almost = min(n, n_begin + LOOK_AHEAD);
    if (n < n_begin && lane == 0) mbarrier_arrive(smem_address(&shared.almost_loaded));
    PagePiece piece = piece_of(n);
#pragma unroll 1
    for (; n >= n_begin; --n, ring.advance()) {
      const PagePiece next = piece_of(n - 1);
      if (n == n_almost && lane == 0) mbarrier_arrive(smem_address(&shared.almost_loaded));
      barriers.wait_empty(ring);
      const uint32_t full = smem_address(&barriers.full[ring.stage]);
      if (lane == 0) mbarrier_arrive_expect(full, TileKV::BYTES);
      __syncwarp();  // the barrier knows of the bytes
      if (first_row < L::BLOCK_N) {
        pages.template load<TileKV>(smem + ring.stage * TileKV::BYTES, full, piece, head_kv);
      }
      piece = next;
    }
    __syncwarp();  // all lanes have read the record
  }
}
