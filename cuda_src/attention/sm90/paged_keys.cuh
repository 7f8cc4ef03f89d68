// The loader of K and V in pages (key_pages.cuh): a whole warp, of which each lane copies one box
// of a tile, so that a tile takes one load from the table, which is made a tile ahead.
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

// The pages of one query tile's sequence.
struct TilePages {
  const PagesOfKeys& pages;
  const int* table;  // of the sequence
  SeenPages seen;
  const TensorMap* first_v;  // the maps of its first page and of its last one
  const TensorMap* last_v;

  template <class Params>
  __device__ TilePages(const Params& params, const FwdTile& tile)
      : pages(params),
        table(pages.table + tile.batch * pages.rows.table_stride),
        seen(pages.rows, tile.sequence),
        first_v(params.sequence_maps + static_cast<int>(FIRST_PAGE_OF_V) * params.base.shape.batch +
                tile.batch),
        last_v(params.sequence_maps + static_cast<int>(LAST_PAGE_OF_V) * params.base.shape.batch +
               tile.batch) {
    tensor_map_acquire(*first_v);
    tensor_map_acquire(*last_v);
  }

  // The box of a lane that begins with this key.
  __device__ PagePiece at(int key) const {
    const int number = pages.rows.page_of(key);
    int entry = -1;
    if (number >= seen.first && number <= seen.last) entry = table[number];
    return {number, entry, key - number * pages.rows.page_size};
  }
};

template <class Params, class L>  // Params is FlashFwdSm90Params
__device__ __forceinline__ void load_paged_keys(const Params& params, FwdShared<L>& shared,
                                                uint32_t smem) {
  const AttentionShape& shape = params.base.shape;
  const int lane = threadIdx.x % 32;
  const int first_row = lane * params.box_rows;  // of the lane's box in a tile
  Ring<FWD_TILE_RECORDS> record;
  Ring<L::KV_STAGES> k_ring, v_ring;
  const auto choose_next_tile = [&] {
    if (lane == 0) mbarrier_arrive(smem_address(&shared.almost_loaded));
  };
#pragma unroll 1
  for (;; record.advance()) {
    const FwdTile& tile = shared.wait_tile(record);
    if (tile.m_rows == 0) return;
    if (!tile.has_keys()) {
      choose_next_tile();
      continue;
    }
    const TilePages pages(params, tile);
    const int head_kv = tile.head / (shape.heads_q / shape.heads_kv);
    const auto load = [&](auto tile_kv, const TensorMap* map, int row, int entry, uint32_t tiles,
                          RingBarriers<L::KV_STAGES>& barriers, Ring<L::KV_STAGES>& ring) {
      using TileKV = decltype(tile_kv);
      barriers.wait_empty(ring);
      const uint32_t full = smem_address(&barriers.full[ring.stage]);
      if (lane == 0) mbarrier_arrive_expect(full, TileKV::BYTES);
      __syncwarp();  // the barrier knows of the bytes
      if (first_row < L::BLOCK_N) {
        const int page = params.rows.has(entry) ? entry : -1;
        const uint32_t to = tiles + ring.stage * TileKV::BYTES + first_row * TileKV::ROW_BYTES;
#pragma unroll
        for (int block = 0; block < TileKV::NUM_BLOCKS; ++block) {
          tma_load(to + block * TileKV::BLOCK_BYTES, *map, full, block * 64, row, head_kv, page);
        }
      }
      __syncwarp();
      ring.advance();
    };
    const auto load_k = [&](const PagePiece& piece) {
      load(typename L::TileK(), &params.k_map, piece.row, piece.entry, smem + L::K_OFFSET, shared.k,
           k_ring);
    };
    const auto load_v = [&](const PagePiece& piece) {
      const bool first = piece.number == pages.seen.first && pages.seen.first_row > 0;
      const bool last = piece.number == pages.seen.last;
      const TensorMap* map = first ? pages.first_v : last ? pages.last_v : &params.v_map;
      load(typename L::TileV(), map, first ? piece.row - pages.seen.first_row : piece.row,
           piece.entry, smem + L::V_OFFSET, shared.v, v_ring);
    };
    const int n_begin = tile.n_range.begin;
    int n = tile.n_range.end - 1;
    const int n_almost = min(n, n_begin + LOOK_AHEAD);
    const auto piece_of = [&](int n) { return pages.at(max(n, 0) * L::BLOCK_N + first_row); };
    PagePiece piece = piece_of(n), next = piece_of(n - 1);
    load_k(piece);
#pragma unroll 1
    for (; n > n_begin; --n) {
      if (n == n_almost) choose_next_tile();
      load_k(next);
      const PagePiece after = piece_of(n - 2);
      load_v(piece);
      piece = next;
      next = after;
    }
    if (n == n_almost) choose_next_tile();
    load_v(piece);
  }
}
