// Terms of keys in the forward of Hopper. Where a text is
//
//   score * factor(query) + shift(query) + term(key)        a gate, or what is known of keys
//
// one more step of the product S = Q K^T adds (base + term) / (scale * factor), so that a score
// needs no instruction of its own for its term: the softmax multiplies S by a factor of the row,
// and adds shift - base. Warp 3 of the producers computes the terms of a key tile, once for all
// consumers, while they work on the tiles before.
//
// The base is the shift of the first query of the tile. Shifts and terms may be large numbers that
// cancel, as the sums of a forget gate do; with the base, what is rounded is small where a weight
// is not.
#pragma once
#include "../sm90/fwd_block.cuh"

namespace text {

// The base of a query tile.
template <class Params>
__device__ __forceinline__ float base_of_shifts(const EveryFwdTile& tile, const Params& params) {
  return shift_of_query(tile.batch, tile.head, tile.m_begin, 0, params);
}

// A factor and a shift for each of the two rows of a lane, as a term of the online softmax.
struct RowTerms {
  static constexpr bool MAY_FAIL = false;
  float factor[2], shift[2];

  __device__ float scaled(float score, int half, int, float scale, float offset) const {
    return score * (factor[half] * scale) + (shift[half] * scale - offset);
  }
};

// The terms of a query tile, for one lane of the forward. L is the FwdLayout. A consumer with terms
// of keys has this struct where others have TileLines.
template <class L>
struct KeyTerms {
  using T = bfloat16_t;  // of the operand
  static constexpr bool OF_TEXT = true;
  static constexpr bool EXIST = true;
  // Shifts that differ more from their base might cancel with terms that have been rounded.
  static constexpr float MOST_SHIFT = 0x1p10f;

  // Whether S may have the terms of the warp's rows. Otherwise all tiles compute the text, as near
  // ones do.
  bool fit;
  RowTerms rows;
  uint2 operands;

  __device__ __forceinline__ bool is_near(int) const { return !fit; }
  __device__ __forceinline__ void locate(const FarDistances&, int, int, int) { fit = false; }

  // Finds the rows of the query tile of a FwdConsumer.
  template <class C>
  __device__ __forceinline__ void begin(const C& consumer) {
    const auto& tile = *consumer.tile;
    const auto& score = consumer.score;
    const float base = base_of_shifts(tile, score.params);
    float inverse[2];
    bool in_range = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = min(consumer.first_query + 8 * half, tile.sequence.seqlen_q - 1);
      float& factor = rows.factor[half];
      float& shift = rows.shift[half];
      factor = score.inner * factor_of_query(tile.batch, tile.head, query, 0, score.params);
      shift = shift_of_query(tile.batch, tile.head, query, 0, score.params) - base;
      const float guess = rcp_approx(factor);
      inverse[half] = guess * (2.f - factor * guess);
      in_range = in_range && fabsf(factor) > 1.f / L::Numbers::LIMIT &&
                 fabsf(factor) < L::Numbers::LIMIT && fabsf(shift) < MOST_SHIFT;
    }
    fit = __all_sync(0xffffffffu, in_range);
    operands = {L::Numbers::row_operand(inverse[0]), L::Numbers::row_operand(inverse[1])};
  }

  // Whether the next tile may have its terms, as far as the maxima of the rows say: beside a huge
  // one a term that is out of range may be a score like others.
  __device__ __forceinline__ bool serve(const RowState& state) const {
    const float most = fmaxf(fabsf(state.max[0]), fabsf(state.max[1]));
    return __all_sync(0xffffffffu, most < HUGE_LOG2);
  }

  __device__ __forceinline__ uint2 operand(int, bool near) const {
    return near ? uint2{0u, 0u} : operands;
  }

  // Returns the term that update_at_old_max() adds to the scores.
  template <class Score>
  __device__ __forceinline__ RowTerms term(const Score&, int) const {
    return rows;
  }
};

// A term as the tile may have it. Out of range it leaves no digit of a score beside it: a negative
// one becomes so small that its weight is 0, any other, NaN too, so large that its weight is inf.
// Then the step computes its scores again.
template <class Numbers>
__device__ __forceinline__ float term_in_range(float term) {
  return fabsf(term) < Numbers::LIMIT ? term : term < 0.f ? -Numbers::MOST : Numbers::MOST;
}

// The warp that writes the terms of the keys for each stage of K, whose barriers it shares with the
// loader of K. As soon as it has begun a tile, it lets the scheduler go on. A key past the end
// counts as the last one. Its instructions are few, for they delay those of the consumers.
template <class Params, class L>
__device__ __forceinline__ void write_key_terms(const Params& params, FwdShared<L>& shared,
                                                uint32_t smem) {
  using Numbers = typename L::Numbers;
  constexpr int ROUNDS = ceil_div(L::BLOCK_N, 32);
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
    const float base = base_of_shifts(tile, params.base);
#pragma unroll 1
    for (int n = range.end - 1; n >= range.begin; --n, ring.advance()) {
      const int key_tile = TurnedFwdTile::turned(n, turn, range.begin, range.end);
      const int first = opaque(key_tile * L::BLOCK_N + lane);
      float terms[ROUNDS];
      bool fit = true;
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) {
        const int key = min(first + i * 32, last_key);
        terms[i] = base + term_of_key(batch, head, 0, key, params.base);
        fit = fit && fabsf(terms[i]) < Numbers::LIMIT;
      }
      if (!__all_sync(0xffffffffu, fit)) {
#pragma unroll
        for (float& x : terms) x = term_in_range<Numbers>(x);
      }
      shared.k.wait_empty(ring);
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) {
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
