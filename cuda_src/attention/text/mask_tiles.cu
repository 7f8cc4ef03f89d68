// Finds the two bits of each tile of a mask that a caller has written, and the bits of the scores
// of its partial tiles (tile_bits.cuh). The mask does not depend on the head. A block makes a word
// of "some" and one of "all": its warps take the 32 tiles in turn. The lanes of a warp have
// neighbouring keys, and stop as soon as a tile is neither empty nor full. Then the warps take the
// fragments of the partial tiles in turn.
#include "seen_scores.cuh"

struct MaskTilesParams : Captures {
  uint32_t* bits;
  uint32_t* places;
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const int* seqused_q;
  const int* seqused_k;
  AttentionShape shape;
  int rows;  // of tiles, in each sequence
  int words;
  int word_places;
};

// The rows between two looks at whether a tile is mixed.
constexpr int ROWS_AT_ONCE = 8;

// The place of the bit that has so many others below it.
__device__ __forceinline__ int bit_of(uint32_t bits, int others) {
  for (; others > 0; --others) bits &= bits - 1;
  return 31 - __clz(bits & -bits);
}

// A fragment has 16 keys or queries as rows, and COLUMNS of the others.
template <int BLOCK_M, int BLOCK_N, bool BY_KEYS, bool ROWS_ARE_KEYS, int COLUMNS, int NUM_WARPS>
__global__ void __launch_bounds__(NUM_WARPS * 32)
    mask_tiles(const __grid_constant__ MaskTilesParams params) {
  __shared__ bool has_some[32], has_all[32];
  const int word = blockIdx.x % params.words;
  const int row = blockIdx.x / params.words % params.rows;
  const int batch = blockIdx.x / params.words / params.rows;
  const Sequence sequence = load_sequence(params, batch);
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < 32; i += NUM_WARPS) {
    const int q_tile = BY_KEYS ? word * 32 + i : row;
    const int k_tile = BY_KEYS ? row : word * 32 + i;
    const int q_end = min((q_tile + 1) * BLOCK_M, sequence.seqlen_q);
    const int k_end = min((k_tile + 1) * BLOCK_N, sequence.seqlen_k);
    bool some = false, all = true, mixed = false;
#pragma unroll 1
    for (int q = q_tile * BLOCK_M; q < q_end && !mixed; q += ROWS_AT_ONCE) {
#pragma unroll 1
      for (int k = k_tile * BLOCK_N + lane; k < k_end; k += 32) {
#pragma unroll
        for (int j = 0; j < ROWS_AT_ONCE; ++j) {
          const bool seen = text::user_mask(batch, 0, min(q + j, q_end - 1), k, params);
          some |= seen;
          all &= seen;
        }
      }
      mixed = __any_sync(0xffffffffu, some) && __any_sync(0xffffffffu, !all);
    }
    const bool any = __any_sync(0xffffffffu, some);
    if (lane == 0) {
      has_some[i] = any;
      has_all[i] = any && !mixed;
    }
  }
  __syncthreads();  // all tiles are known
  const uint32_t some_word = __ballot_sync(0xffffffffu, has_some[lane]);
  const uint32_t all_word = __ballot_sync(0xffffffffu, has_all[lane]);
  const int64_t number = (int64_t(batch) * params.rows + row) * params.words + word;
  if (threadIdx.x == 0) {
    uint32_t* to = params.bits + 2 * number - word;
    to[0] = some_word;
    to[params.words] = all_word;
  }

  constexpr int FRAGMENTS_BESIDE = (ROWS_ARE_KEYS ? BLOCK_M : BLOCK_N) / COLUMNS;
  constexpr int WORDS = seen_words(COLUMNS / 8);
  constexpr int OF_TILE = (ROWS_ARE_KEYS ? BLOCK_N : BLOCK_M) / 16 * FRAGMENTS_BESIDE * WORDS;
  const uint32_t partial = some_word & ~all_word;
  const int end = min(__popc(partial), params.word_places) * OF_TILE;
  uint32_t* place = params.places + number * params.word_places * OF_TILE * 32 + lane;
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < end; i += NUM_WARPS) {
    const int tile = word * 32 + bit_of(partial, i / OF_TILE), fragment = i % OF_TILE / WORDS;
    const int q_begin = (BY_KEYS ? tile : row) * BLOCK_M,
              k_begin = (BY_KEYS ? row : tile) * BLOCK_N;
    const int first_row = fragment / FRAGMENTS_BESIDE * 16;
    const int first_col = fragment % FRAGMENTS_BESIDE * COLUMNS + i % WORDS * 64;
    place[i * 32] = seen_word<ROWS_ARE_KEYS>(params, batch, sequence,
                                             (ROWS_ARE_KEYS ? k_begin : q_begin) + first_row,
                                             (ROWS_ARE_KEYS ? q_begin : k_begin) + first_col);
  }
}
