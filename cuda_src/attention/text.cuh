// A score or a mask of the caller's own, as text. The program of a kernel that has one begins with
// it: the macros below, the struct of its captures, and the functions that are declared here. The
// host writes that (score_text/). A kernel without a text takes the same steps as if nothing were
// here.
//
//   score  a function of the score, scale * S, of the sequence, the query head and the positions of
//          query and key within the sequence. N is Scaled (text/scaled.cuh), or in the backward
//          Dual (text/dual.cuh), which carries the derivative. A score of -INF masks.
//   mask   whether the query sees the key
//
// The host can also define USER_DROPOUT and text::first_weight, for a call that computes a part of
// more: dropout numbers its weights from there on.
#pragma once
#include "text/captures.cuh"
#include "text/dual.cuh"
#include "text/scaled.cuh"
#include "text/tile_bits.cuh"

#ifdef USER_SCORE
struct Captures;
#else
#define USER_SCORE false
#define USER_MASK false
struct Captures {};  // a base class of no bytes
#endif
// Whether the kernel knows which tiles the mask leaves empty, or full. Then its arguments begin
// with their bits.
#ifdef USER_TILES
constexpr bool HAS_MASK_TILES = true;
using MaskTiles = MaskTileBits;
#else
constexpr bool HAS_MASK_TILES = false;
struct MaskTiles {};
#endif
constexpr bool HAS_USER_SCORE = USER_SCORE;
// Whether the score is score_of_tanh() of tanh(tanh_argument()), and NaN where that is.
#ifdef USER_TANH
constexpr bool HAS_USER_TANH = true;
#else
constexpr bool HAS_USER_TANH = false;
#endif
// The parts that many scores of a tile have in common, if score_of_parts() reads them in the place
// of user_score() (text/parts.cuh). SHIFT: it adds only the part of the distance and what all
// scores of a head have. SLOPE: its derivative by the score does not depend on the score. LINE: the
// part of the distance has the slope slope_of_distance() where it is linear, else the slope 0.
// TERM: the text is score * factor_of_query() + shift_of_query() + term_of_key().
enum class TextParts {
  DISTANCE = 1,
  QUERY = 2,
  KEY = 4,
  SHIFT = 8,
  SLOPE = 16,
  LINE = 32,
  TERM = 64
};
#ifdef USER_PARTS
constexpr int TEXT_PARTS = USER_PARTS;
#else
constexpr int TEXT_PARTS = 0;
#endif
constexpr bool has_part(TextParts part) { return TEXT_PARTS & int(part); }
constexpr bool HAS_USER_PARTS =
    has_part(TextParts::DISTANCE) || has_part(TextParts::QUERY) || has_part(TextParts::KEY);
// Whether a text that shifts is linear in the distance from far_distances() on (text/lines.cuh).
#ifdef USER_FAR
constexpr bool HAS_USER_FAR = true;
#else
constexpr bool HAS_USER_FAR = false;
#endif
// Where distances are far: from which query - key on the keys lie far behind their queries, and
// from which key - query on far ahead of them.
struct FarDistances {
  static constexpr int NEVER = 1 << 30;  // as large as no distance
  int behind = 0;
  int ahead = 1;  // the distance 0 lies on one side only

  __device__ static void raise(int& least, int64_t bound) {
    least = bound < least ? least : bound < NEVER ? int(bound) : NEVER;
  }
  // Whether all distances query - key from `least` to `most` are far on the same side.
  __device__ bool contain(int least, int most) const { return least >= behind || -most >= ahead; }
};
constexpr bool HAS_USER_MASK = USER_MASK;
#ifdef USER_DROPOUT
constexpr bool HAS_USER_DROPOUT = true;
#else
constexpr bool HAS_USER_DROPOUT = false;
#endif

// Where dropout numbers the weights of a sequence and a query head from.
struct FirstWeight {
  uint32_t z;    // the number of the sequence times all query heads, plus that of the head
  uint32_t row;  // multiples of 16
  uint32_t col;
};

// What no text defines is declared for the branches that are not compiled then.
namespace text {
#if !USER_SCORE
template <class N>
__device__ N user_score(N score, int batch, int head, int query, int key, const Captures& captures);
#endif
#ifndef USER_TANH
template <class N>
__device__ N tanh_argument(N score, int batch, int head, int query, int key,
                           const Captures& captures);
template <class N, class Tanh>
__device__ N score_of_tanh(N score, Tanh bounded, int batch, int head, int query, int key,
                           const Captures& captures);
#endif
#ifndef USER_PARTS
template <class N, class Parts>
__device__ N score_of_parts(N score, Parts parts, int batch, int head, int query, int key,
                            const Captures& captures);
#endif
#ifndef USER_FAR
__device__ FarDistances far_distances(const Captures& captures);
#endif
#if !USER_MASK
__device__ bool user_mask(int batch, int head, int query, int key, const Captures& captures);
#endif
#ifndef USER_DROPOUT
__device__ FirstWeight first_weight(int batch, int head, const Captures& captures);
#endif
}  // namespace text
