// Parts of a text that many scores of a tile have in common (score_text/parts.py): what depends on
// the distance of query and key alone, or on one of the two. A warp computes those of the 16 rows
// of its fragment once, each lane some of them, and every score reads them from shared memory.
#pragma once
#include "../score.cuh"

namespace text {

// The parts of one score, as score_of_parts() reads them.
struct Parts {
  float distance, query, key;
};

// The part of a query or of a key.
template <bool IS_QUERY, class Params>
__device__ __forceinline__ float part_of_place(int batch, int head, int place,
                                               const Params& params) {
  if constexpr (IS_QUERY) {
    return part_of_query(batch, head, place, 0, params);
  } else {
    return part_of_key(batch, head, 0, place, params);
  }
}

// Where the parts for a fragment of 8 N columns lie in shared memory: a lane reads four numbers at
// once, and the lanes read different banks.
template <int N>
struct alignas(16) SharedParts {
  // Scores [n][i] of a lane have distances that differ by 8 from one n to the next. A line holds
  // these. Distances are numbered from that of the first column and the last row on.
  static constexpr int DISTANCES = 8 * N + 15;
  static constexpr int LINE = 4 * (ceil_div(N + 1, 4) | 1);
  static constexpr int LINES = 16;
  // The columns of a lane are pairs, which lie in a line, too.
  static constexpr int COLUMN_LINE = 4 * (ceil_div(N, 2) | 1);

  float distances[has_part(TextParts::DISTANCE) ? LINES * LINE : 4];
  float columns[4 * COLUMN_LINE];
  float rows[32];  // those of 16 rows twice, so that all lanes have the same work

  __device__ const float& of_distance(int line, int n) const { return distances[line * LINE + n]; }
  // Two lines have each number, but for the first ones. What a line has behind its N + 1 numbers is
  // not read.
  __device__ void set_distance(int number, float x) {
    const int line = number % 8, n = number / 8;
    distances[line * LINE + n] = x;
    if (n > 0) distances[(line + 8) * LINE + n - 1] = x;
  }
  __device__ float& of_column(int column) {
    return columns[column / 2 % 4 * COLUMN_LINE + column / 8 * 2 + column % 2];
  }
  static_assert(LINE > N + 1 && ceil_div(DISTANCES, 32) * 4 <= LINE, "lines have room");
};

// The shared memory of a block, with the parts of each consumer warp where it has any. The backward
// spills 44 bytes where the parts are a second base class instead.
struct NoShared {};
template <bool HAS_PARTS, int N, int WARPS, class Shared = NoShared>
struct PartsOfWarps {
  struct With : Shared {
    SharedParts<N> parts[WARPS];
  };
  using Type = typename Choose<HAS_PARTS, With, Shared>::Type;
};

// The parts of a tile that a lane has computed for its warp. Loads may still be in flight.
template <int N>
struct OwnParts {
  float distances[ceil_div(8 * N + 15, 32)];
  float columns[ceil_div(N, 4)];
};
template <>
struct OwnParts<0> {};

// The parts that the scores of a lane read, in its registers.
template <int N>
struct LaneParts {
  float distances[2][N + 1];
  float columns[N][2];
  float rows[2];
};

// Whether all distances of a tile have this part, and the text only adds it to the score.
struct CommonShift {
  bool exists;
  float part;
};

// The score of a text where S is 0.
template <class Params>
__device__ __forceinline__ float shift_of_zero(const CommonShift& shift, int batch, int head,
                                               const Params& params) {
  return score_of_parts(Scaled(0.f), Parts{shift.part, 0.f, 0.f}, batch, head, 0, 0, params);
}

// Where the distances of the text are far, if it says so.
template <class Params>
__device__ __forceinline__ FarDistances far_or_none(const Params& params) {
  if constexpr (HAS_USER_FAR) return far_distances(params);
  return {};
}

// Computes this lane's share of the parts of a tile of a sequence with so many queries and keys. A
// position past the end counts as the last one, and a distance that only such positions have as
// another one.
template <Rows ROWS, int N, class Params>
__device__ __forceinline__ void compute_parts(OwnParts<N>& own, const ScorePlace<ROWS>& at,
                                              int seqlen_q, int seqlen_k, const Params& params) {
  constexpr bool ROWS_ARE_QUERIES = ROWS == Rows::QUERIES;
  const int lane = threadIdx.x % 32;
  const int first_row = at.row - lane / 4, first_col = at.col - lane % 4 * 2;
  [[maybe_unused]] const int end_row = ROWS_ARE_QUERIES ? seqlen_q : seqlen_k;
  [[maybe_unused]] const int end_col = ROWS_ARE_QUERIES ? seqlen_k : seqlen_q;
  if constexpr (has_part(TextParts::DISTANCE)) {
    const int least = max(0, 16 - (end_row - first_row));
    const int most = min(SharedParts<N>::DISTANCES - 1, 14 + end_col - first_col);
#pragma unroll
    for (int round = 0; round < ceil_div(8 * N + 15, 32); ++round) {
      const int number = max(min(lane + round * 32, most), least);
      const int distance = first_col - first_row + number - 15;  // of the column from the row
      own.distances[round] =
          part_of_distance(at.batch, at.head, 0, ROWS_ARE_QUERIES ? distance : -distance, params);
    }
  }
  if constexpr (has_part(ROWS_ARE_QUERIES ? TextParts::KEY : TextParts::QUERY)) {
#pragma unroll
    for (int round = 0; round < ceil_div(N, 4); ++round) {
      const int col = min(first_col + lane + round * 32, end_col - 1);
      own.columns[round] = part_of_place<!ROWS_ARE_QUERIES>(at.batch, at.head, col, params);
    }
  }
}

// Shares what the lanes of a warp have computed. In the forward it says whether all distances have
// the same part.
template <Rows ROWS, int N>
__device__ __forceinline__ CommonShift share_parts(SharedParts<N>& to, const OwnParts<N>& own) {
  constexpr bool ROWS_ARE_QUERIES = ROWS == Rows::QUERIES;
  const int lane = threadIdx.x % 32;
  CommonShift shift = {};
  __syncwarp();  // all lanes have read the parts of the last tile
  if constexpr (has_part(TextParts::DISTANCE)) {
#pragma unroll
    for (int round = 0; round < ceil_div(8 * N + 15, 32); ++round)
      to.set_distance(lane + round * 32, own.distances[round]);
    if constexpr (ROWS_ARE_QUERIES && has_part(TextParts::SHIFT)) {
      bool same = true;
      shift.part = __shfl_sync(0xffffffffu, own.distances[0], 0);
#pragma unroll
      for (float x : own.distances) same = same && x == shift.part;
      shift.exists = __all_sync(0xffffffffu, same);
    }
  }
  if constexpr (has_part(ROWS_ARE_QUERIES ? TextParts::KEY : TextParts::QUERY)) {
#pragma unroll
    for (int round = 0; round < ceil_div(N, 4); ++round) {
      const int col = lane + round * 32;
      if (col < 8 * N) to.of_column(col) = own.columns[round];
    }
  }
  __syncwarp();  // the parts of all lanes are there
  return shift;
}

// Computes and shares the parts of the rows, which many tiles have in common.
template <Rows ROWS, int N, class Params>
__device__ __forceinline__ void set_rows(SharedParts<N>& to, const ScorePlace<ROWS>& at,
                                         const Params& params) {
  constexpr bool ROWS_ARE_QUERIES = ROWS == Rows::QUERIES;
  if constexpr (has_part(ROWS_ARE_QUERIES ? TextParts::QUERY : TextParts::KEY)) {
    const int lane = threadIdx.x % 32;
    const int end = ROWS_ARE_QUERIES ? at.sequence.seqlen_q : at.sequence.seqlen_k;
    const int row = min(at.row - lane / 4 + lane % 16, end - 1);
    __syncwarp();  // all lanes have read the rows before
    to.rows[lane] = part_of_place<ROWS_ARE_QUERIES>(at.batch, at.head, row, params);
    __syncwarp();
  }
}

// Loads the parts of this lane's columns.
template <int N>
__device__ __forceinline__ void load_columns(float (&columns)[N][2], const SharedParts<N>& from,
                                             int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      columns[n][i] = from.columns[lane % 4 * SharedParts<N>::COLUMN_LINE + n * 2 + i];
  }
}

// Loads the parts that the scores of this lane read.
template <int N>
__device__ __forceinline__ LaneParts<N> load_parts(const SharedParts<N>& from, int lane) {
  LaneParts<N> parts;
  load_columns(parts.columns, from, lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) parts.rows[i] = from.rows[lane / 4 + i * 8];
  if constexpr (has_part(TextParts::DISTANCE)) {
    const int line = lane % 4 * 2 - lane / 4 + 7;
#pragma unroll
    for (int n = 0; n < N + 1; ++n) {
      parts.distances[0][n] = from.of_distance(line, n);
      parts.distances[1][n] = from.of_distance(line + 1, n);
    }
  }
  return parts;
}

// Calls function(s[n][i], n, i, parts, query, key) for each element, with Places.
template <Rows ROWS, int N, class Score, class Function>
__device__ __forceinline__ void for_each_with_parts(float (&s)[N][4],
                                                    const LaneParts<N>& lane_parts,
                                                    const Score& score, const ScorePlace<ROWS>& at,
                                                    bool masked, Function function) {
  score.template for_each_place<true>(
      s, at, masked, [&](float& x, int n, int i, auto query, auto key) {
        const float of_row = lane_parts.rows[i / 2], of_column = lane_parts.columns[n][i % 2];
        const float of_distance =
            has_part(TextParts::DISTANCE) ? lane_parts.distances[i % 2][n + 1 - i / 2] : 0.f;
        const Parts parts = {of_distance, ROWS == Rows::QUERIES ? of_row : of_column,
                             ROWS == Rows::QUERIES ? of_column : of_row};
        function(x, n, i, parts, query, key);
      });
}

}  // namespace text
