// mask_tiles.cu evaluates the mask of a caller and leaves two bits for each tile: "some" query of
// the tile sees some key of it, and "all" see all. The kernels walk over the tiles with the first
// bit, and apply the mask where the second is missing. Such a tile is partial; as long as there is
// a place for it, a bit of each of its scores lies in memory (seen_scores.cuh).
#pragma once
#include "../../common/types.cuh"

// The bits in memory, in front of the captures: for each sequence and row of tiles `words` words of
// "some" and as many of "all". A row has the key tiles of a query tile, or the query tiles of a key
// tile in the backward. Each word of each row has as many places for partial tiles.
struct MaskTileBits {
  const uint32_t* bits;
  const uint32_t* places;
  int batch_words;  // of "some" of a sequence; 0: all have those of the first one
  int words;
  int word_places;
  int place_words;  // the size of a place
  // For each sequence its rows by their number in TileOrder, from the shortest to the longest
  // (mask_order.cu). Null where sequences have lengths of their own, which are in order themselves.
  const int* order;
  int batch_rows;       // from one sequence to the next; 0: all have the rows of the first one
  uint8_t padding[20];  // 64 bytes in all
};

// The number in TileOrder of the row of which it has the place. Params is the argument of the
// kernel, which begins with a MaskTileBits.
template <class Params>
__device__ int row_by_work(const Params& params, int batch, int place) {
  const MaskTileBits& tiles = reinterpret_cast<const MaskTileBits&>(params);
  return tiles.order ? tiles.order[int64_t(batch) * tiles.batch_rows + place] : place;
}

// Tiles [begin, last] of a row, in which the mask is applied to all or to none. `last` is -1 if
// there is none.
struct TileRun {
  int begin;
  int last;
  bool masked;
};

// A row of tiles, as the record of a block's tile has it.
struct TileRow {
  const uint32_t* some;
  int words;
  int first_word;  // the number of its first one among those of all rows

  // Params is the argument of the kernel, which begins with a MaskTileBits.
  template <class Params>
  __device__ void locate(const Params& params, int batch, int row) {
    const MaskTileBits& tiles = reinterpret_cast<const MaskTileBits&>(params);
    words = tiles.words;
    first_word = batch * tiles.batch_words + row * words;
    some = tiles.bits + 2 * int64_t(first_word);
  }

  // The last tile up to this one that has the bit "some", or -1.
  __device__ int last_up_to(int tile) const {
    if (tile < 0) return -1;
    int word = tile / 32;
    uint32_t bits = some[word] & 0xffffffffu >> (31 - tile % 32);
    while (bits == 0) {
      if (--word < 0) return -1;
      bits = some[word];
    }
    return word * 32 + 31 - __clz(bits);
  }

  // The run that ends with the last tile up to this one that has the bit "some", of tiles that are
  // alike and have bits in one word. A full tile that the range has masked is a run of its own.
  template <class Range>
  __device__ TileRun run_up_to(int tile, const Range& range) const {
    tile = last_up_to(tile);
    if (tile < range.begin) return {0, -1, true};
    const uint32_t all = some[words + tile / 32];
    const bool full = all >> tile % 32 & 1, masked = !full || range.needs_mask(tile);
    if (full && masked) return {tile, tile, true};
    const uint32_t alike = full ? all : some[tile / 32] & ~all;
    const int begin = tile + 1 - __clz(~(alike << (31 - tile % 32)));
    return {max(begin, full ? max(range.begin, range.inner_begin) : range.begin), tile, masked};
  }

  // The first tile from this one on that has it, or `end`.
  __device__ int first_from(int tile, int end) const {
    for (; tile < end; ++tile) {
      const uint32_t bits = some[tile / 32] >> tile % 32;
      if (bits & 1) return tile;
      if (bits == 0) tile |= 31;  // no more in this word
    }
    return end;
  }

  // The tile with the bit that has so many others in front of it in the range, or the last one.
  template <class Range>
  __device__ int some_behind(const Range& range, int others) const {
    int tile = range.begin;
    for (; others > 0 && tile < range.end - 1; --others) tile = first_from(tile + 1, range.end);
    return tile;
  }

  __device__ bool is_full(int tile) const { return some[words + tile / 32] >> tile % 32 & 1; }

  // The bits of the scores of a partial tile, or null if it has no place.
  template <class Params>
  __device__ const uint32_t* place_of(const Params& params, int tile) const {
    const MaskTileBits& tiles = reinterpret_cast<const MaskTileBits&>(params);
    const int word = tile / 32;
    const uint32_t partial = some[word] & ~some[words + word];
    const int before = __popc(partial & ~(0xffffffffu << tile % 32));
    if (before >= tiles.word_places) return nullptr;
    return tiles.places + ((first_word + word) * tiles.word_places + before) * tiles.place_words;
  }

  // Leaves only what lies between the first and the last tile with the bit "some".
  template <class Range>
  __device__ void tighten(Range& range) const {
    range.end = last_up_to(range.end - 1) + 1;
    range.begin = range.begin < range.end ? first_from(range.begin, range.end) : range.end;
  }
};
