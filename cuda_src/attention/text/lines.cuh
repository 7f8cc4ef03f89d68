// Terms of the scores that are linear in the distance of query and key where tiles are far from the
// diagonal: ALiBi, or what a text adds to the score (score_text/far.py). There a term needs no
// instruction of a score's own: it is one number of a row, and where there is room for the numbers
// of the columns, S gets the rest by one more step of its product (common/column_terms.cuh).
#pragma once
#include "../../common/column_terms.cuh"
#include "../../ptx/warpgroup.cuh"
#include "parts.cuh"

// Whether the kernel takes the term of a text so. Near tiles then count as tiles with a mask, so
// that only one copy of the code has the text.
template <class Options>
constexpr bool TEXT_HAS_FAR =
    HAS_USER_SCORE && HAS_USER_FAR && !HAS_USER_MASK && Options::BIAS == BiasKind::NONE;
// The kind of term that S = Q K^T gets by one more step of the product: a line of the distance, or
// the terms of keys (key_terms.cuh). A softcap comes between S and ALiBi, and a bias leaves no
// registers for the operand. Where keys lie in pages, two warps load them, and no warp is left to
// write their terms.
enum class ColumnStep { NONE, LINE, KEY_TERMS };
template <class Options>
constexpr ColumnStep COLUMN_STEP =
    (Options::ALIBI && !Options::SOFTCAP &&
     (Options::BIAS == BiasKind::NONE || Options::BIAS == BiasKind::KEY_MASK)) ||
            (TEXT_HAS_FAR<Options> && has_part(TextParts::LINE))
        ? ColumnStep::LINE
    : has_part(TextParts::TERM) && !HAS_USER_MASK && Options::BIAS == BiasKind::NONE && !HAS_PAGES
        ? ColumnStep::KEY_TERMS
        : ColumnStep::NONE;

// A term of the score, in the units that it has before the softmax: shift + slope * (query - key).
struct DistanceLine {
  float slope;
  float shift;
};

namespace text {

// The line that a text adds to the scores from this distance on, on its side of the diagonal.
template <class Params>
__device__ __forceinline__ DistanceLine line_from(int distance, int batch, int head,
                                                  const Params& params) {
  const int query = max(distance, 0), key = max(-distance, 0);
  float slope = 0.f;
  if constexpr (has_part(TextParts::LINE))
    slope = slope_of_distance(batch, head, query, key, params);
  const CommonShift shift = {true, part_of_distance(batch, head, query, key, params)};
  return {slope, shift_of_zero(shift, batch, head, params) - slope * float(distance)};
}

}  // namespace text

// The lines of a query tile, for one lane of the forward. L is the FwdLayout.
template <class Options, class L>
struct TileLines {
  using T = typename Options::T;  // of the operand
  static constexpr bool OF_TEXT = TEXT_HAS_FAR<Options>;
  static constexpr bool EXIST = OF_TEXT || Options::ALIBI_IS_LINE;

  // Key tiles in front of near_begin lie far behind the queries, and those from near_end on far
  // ahead of them.
  int near_begin, near_end;
  int first_distance;  // of the lane's first query from key 0
  DistanceLine behind, ahead;
  uint32_t operand_behind, operand_ahead;  // the slopes as operands of the product

  __device__ __forceinline__ bool is_near(int key_tile) const {
    return key_tile >= near_begin && key_tile < near_end;
  }
  __device__ __forceinline__ bool is_behind(int key_tile) const { return key_tile < near_begin; }

  // Finds the near tiles of the query tile that begins at m_begin.
  __device__ __forceinline__ void locate(const FarDistances& far, int diagonal, int m_begin,
                                         int row) {
    const FarDistances least = OF_TEXT ? far : FarDistances{-diagonal, diagonal};
    const int64_t behind_from = int64_t(m_begin) + 1 - least.behind;
    const int64_t ahead_from = int64_t(m_begin) + (L::BLOCK_M - 1) + least.ahead;
    near_begin = uniform(int(max(behind_from, int64_t(0)) / L::BLOCK_N));
    near_end = uniform(int((max(ahead_from, int64_t(0)) + L::BLOCK_N - 1) / L::BLOCK_N));
    first_distance = m_begin + row + (OF_TEXT ? 0 : diagonal);
  }

  // Finds the lines of the query tile of a FwdConsumer.
  template <class C>
  __device__ __forceinline__ void begin(const C& consumer) {
    const auto& score = consumer.score;
    if constexpr (OF_TEXT) {
      const int batch = consumer.tile->batch, head = consumer.tile->head;
      const FarDistances& far = consumer.far;
      // A text is not read on a side on which no key tile is far.
      if (near_begin > consumer.n_begin)
        behind = text::line_from(far.behind, batch, head, score.params);
      if (near_end < consumer.n_end) ahead = text::line_from(-far.ahead, batch, head, score.params);
    } else {
      behind = {-score.to_units(consumer.alibi_slope), 0.f};
      ahead = {-behind.slope, 0.f};
    }
    if constexpr (L::TERM_IN_PRODUCT) {
      const float by_column = OF_TEXT ? -rcp_approx(score.inner) : -1.f;  // in the units of S
      operand_behind = slope_operand<T>(behind.slope * by_column);
      operand_ahead = slope_operand<T>(ahead.slope * by_column);
    }
  }

  // The operand of both rows for a key tile, which adds nothing to a near one.
  __device__ __forceinline__ uint2 operand(int key_tile, bool near) const {
    const uint32_t both = near ? 0u : is_behind(key_tile) ? operand_behind : operand_ahead;
    return {both, both};
  }

  // The term that update_at_old_max() adds to the scores of a far key tile.
  template <class Score>
  __device__ __forceinline__ auto term(const Score& score, int key_tile) const {
    const DistanceLine line = is_behind(key_tile) ? behind : ahead;
    const float factor = OF_TEXT ? score.inner : 1.f;
    if constexpr (!EXIST) {
      return NoLinearTerm();
    } else if constexpr (OF_TEXT && !has_part(TextParts::LINE)) {
      return CommonTerm{factor, line.shift};
    } else {
      const int column = L::TERM_IN_PRODUCT ? L::Numbers::MIDDLE : threadIdx.x % 4 * 2;
      const int distance = first_distance - (key_tile * L::BLOCK_N + column);
      const float row = line.shift + line.slope * float(distance);
      return LinearTerm<L::TERM_IN_PRODUCT>{-line.slope, {row, row + 8.f * line.slope}, factor};
    }
  }
};
