// The scores of a partial tile that the mask of a text lets pass, as bits in the order of an
// accumulator fragment (ptx/mma.cuh): so a lane loads its own before a product, and one mask costs
// as much as another. A fragment has 16 rows. Bit n % 8 * 4 + i of word n / 8 of a lane belongs to
// its element [n][i].
#pragma once
#include "../block_info.cuh"
#include "tile_bits.cuh"

constexpr int seen_words(int octets) { return ceil_div(octets, 8); }

// Computes a word of a lane in the fragment that begins at this row and column. Positions past the
// end count as the last ones. The loop is short for the sake of registers.
template <bool ROWS_ARE_KEYS, class Params>
__device__ __forceinline__ uint32_t seen_word(const Params& params, int batch,
                                              const Sequence& sequence, int row, int col) {
  row += threadIdx.x % 32 / 4;
  col += threadIdx.x % 4 * 2;
  const int last_query = sequence.seqlen_q - 1, last_key = sequence.seqlen_k - 1;
  uint32_t word = 0;
#pragma unroll 1
  for (int n = 0; n < 8; ++n) {
    uint32_t octet = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = ROWS_ARE_KEYS ? col + n * 8 + i % 2 : row + i / 2 * 8;
      const int key = ROWS_ARE_KEYS ? row + i / 2 * 8 : col + n * 8 + i % 2;
      const bool seen =
          text::user_mask(batch, 0, min(query, last_query), min(key, last_key), params);
      octet |= uint32_t(seen) << i;
    }
    word = word >> 4 | octet << 28;
  }
  return word;
}

// The words of a lane. A kernel without tiles has none.
template <int N>
struct SomeSeen {
  uint32_t words[seen_words(N)];

  // Loads those of a fragment of a tile, which begins at this row and column. `record` is that of a
  // row of tiles.
  template <bool ROWS_ARE_KEYS, class Params, class Record>
  __device__ __forceinline__ void load(const Params& params, const Record& record, int tile,
                                       int fragment, int row, int col) {
    const bool full = record.row.is_full(tile);
    const uint32_t* place = full ? nullptr : record.row.place_of(params, tile);
#pragma unroll
    for (int i = 0; i < seen_words(N); ++i) {
      words[i] = full    ? 0xffffffffu
                 : place ? place[(fragment * seen_words(N) + i) * 32 + threadIdx.x % 32]
                         : seen_word<ROWS_ARE_KEYS>(params, record.batch, record.sequence, row,
                                                    col + i * 64);
    }
  }
};
struct AllSeen {};
template <int N>
using SeenScores = typename Choose<HAS_MASK_TILES, SomeSeen<N>, AllSeen>::Type;
