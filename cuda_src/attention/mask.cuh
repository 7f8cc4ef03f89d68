// The mask, on the scores in an accumulator fragment of 16 rows (see ptx/mma.cuh; wgmma
// accumulators have the same layout, warp by warp).
#pragma once
#include "block_info.cuh"

// Sets scores to -inf where the query (row) does not see the key (col). row and col are those of
// acc[0][0] in this lane.
template <int N>
__device__ __forceinline__ void mask_scores(float (&acc)[N][4], const Sequence& sequence, int row,
                                            int col) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // One unsigned comparison tests begin <= key < end. An empty range may have end < begin.
    const int begin = sequence.key_begin(row + half * 8);
    const uint32_t length = max(0, sequence.key_end(row + half * 8) - begin);
    const uint32_t first = col - begin;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (first + n * 8 + i >= length) acc[n][half * 2 + i] = -INF;
      }
    }
  }
}

// mask_scores() for a transposed fragment, whose rows are keys and whose columns are queries.
template <int N>
__device__ __forceinline__ void mask_scores_transposed(float (&acc)[N][4], const Sequence& sequence,
                                                       int key, int query) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // One unsigned comparison tests begin <= query < end. No query sees a key past the end.
    const int row = key + half * 8;
    const int begin = sequence.query_begin(row);
    const int end = row < sequence.seqlen_k ? sequence.query_end(row) : 0;
    const uint32_t length = max(0, end - begin);
    const uint32_t first = query - begin;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (first + n * 8 + i >= length) acc[n][half * 2 + i] = -INF;
      }
    }
  }
}
