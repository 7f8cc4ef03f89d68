// Terms of keys in the forward of Hopper. Where a text is
//
//   score * factor(query) + shift(query) + term(key)        a gate, or what is known of keys
//
// one more step of the product S = Q K^T adds term / (scale * factor), so that a score needs no
// instruction of its own for its term: the softmax multiplies S by a factor of the row, and adds a
// number of the row. Warp 3 of the producers computes the terms of a key tile, once for all
// consumers, while they work on the tiles before.
#pragma once
#include "../sm90/fwd_block.cuh"

namespace text {

// What a lane of the forward knows of its two rows; it takes the place of TileLines.
template <class L>
struct KeyTerms {
  using T = bfloat16_t;  // of the operand
  static constexpr bool OF_TEXT = true;
  static constexpr bool EXIST = true;

  // Whether S may have the terms of the warp's rows: only a factor above 0 keeps the order of
  // scores, and its inverse has to be in range. Otherwise all tiles compute the text, as near ones.
  bool fit;
  float factor[2], shift[2];
  uint2 operands;

  __device__ __forceinline__ bool is_near(int) const { return !fit; }
  __device__ __forceinline__ void locate(const FarDistances&, int, int, int) {}

  // Finds the rows of the query tile of a FwdConsumer.
  template <class C>
  __device__ __forceinline__ void begin(const C& consumer) {
    const auto& tile = *consumer.tile;
    const auto& score = consumer.score;
    float inverse[2];
    bool in_range = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = min(consumer.first_query + 8 * half, tile.sequence.seqlen_q - 1);
      factor[half] = score.inner * factor_of_query(tile.batch, tile.head, query, 0, score.params);
      shift[half] = shift_of_query(tile.batch, tile.head, query, 0, score.params);
      const float guess = rcp_approx(factor[half]);
      inverse[half] = guess * (2.f - factor[half] * guess);
      in_range = in_range && factor[half] > 1.f / L::Numbers::LIMIT &&
                 factor[half] < L::Numbers::LIMIT && fabsf(shift[half]) < L::Numbers::LIMIT;
    }
    fit = __all_sync(0xffffffffu, in_range);
    operands = {L::Numbers::row_operand(inverse[0]), L::Numbers::row_operand(inverse[1])};
  }

  __device__ __forceinline__ uint2 operand(int, bool near) const {
    return near ? uint2{0u, 0u} : operands;
  }

  // A factor of the row and a number of the row, for update_at_old_max().
  struct RowTerm {
    static constexpr bool MAY_FAIL = false;
    float factor[2], shift[2];

    __device__ float scaled(float score, int half, int, float scale, float offset) const {
      return score * (factor[half] * scale) + (shift[half] * scale - offset);
    }
  };
  template <class Score>
  __device__ __forceinline__ RowTerm term(const Score&, int) const {
    return {{factor[0], factor[1]}, {shift[0], shift[1]}};
  }
};

// A term as the tile may have it. One of -inf becomes so small that its weight is 0. Others that
// are out of range become so large that a weight is inf, for which the step computes its scores
// again.
template <class Numbers>
__device__ __forceinline__ float term_in_range(float term) {
  return fabsf(term) < Numbers::LIMIT ? term : term == -INF ? -Numbers::MOST : Numbers::MOST;
}

// The warp that writes the terms of the keys for each stage of K, whose barriers it shares with the
// loader of K. As soon as it has begun a tile, it lets the scheduler go on. A key past the end
// counts as the last one. Its instructions are few, for they delay those of the consumers.
template <class Params, class L>
__device__ __forceinline__ void write_key_terms(const Params& params, FwdShared<L>& shared,
                                                uint32_t smem) {
  using Numbers = typename L::Numbers;
  const int lane = threadIdx.x % 32;
  Ring<FWD_TILE_RECORDS> record;
  Ring<L::KV_STAGES> ring;
#pragma unroll 1
  for (;; record.advance()) {
    const TurnedFwdTile& tile = shared.wait_tile(record);
    if (tile.m_rows == 0) return;
    if (lane == 0) mbarrier_arrive(smem_address(&shared.almost_loaded));
    const TileRange range = tile.n_range;
    const int turn = tile.turn, batch = tile.batch, head = tile.head;
    const int last_key = tile.sequence.seqlen_k - 1;
#pragma unroll 1
    for (int n = range.end - 1; n >= range.begin; --n, ring.advance()) {
      const int key_tile = TurnedFwdTile::turned(n, turn, range.begin, range.end);
      const int first = opaque(key_tile * L::BLOCK_N + lane);
      float terms[ceil_div(L::BLOCK_N, 32)];
      bool fit = true;
#pragma unroll
      for (int i = 0; i < ceil_div(L::BLOCK_N, 32); ++i) {
        terms[i] = term_of_key(batch, head, 0, min(first + i * 32, last_key), params.base);
        fit = fit && fabsf(terms[i]) < Numbers::LIMIT;
      }
      if (!__all_sync(0xffffffffu, fit)) {
#pragma unroll
        for (float& x : terms) x = term_in_range<Numbers>(x);
      }
      shared.k.wait_empty(ring);
#pragma unroll
      for (int i = 0; i < ceil_div(L::BLOCK_N, 32); ++i) {
        const int column = i * 32 + lane;
        if (column < L::BLOCK_N) Numbers::store(smem, ring.stage, column, terms[i]);
      }
      fence_async_proxy();
      __syncwarp();  // all lanes have written
      if (lane == 0) mbarrier_arrive(smem_address(&shared.k.full[ring.stage]));
    }
    __syncwarp();  // all lanes have read the record
  }
}

}  // namespace text
