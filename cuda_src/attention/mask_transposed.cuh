// The mask on a transposed fragment: rows are keys, columns are queries. Softcap and ALiBi of
// mask.cuh serve as they are (ALiBi with the diagonal negated).
#pragma once
#include "mask.cuh"

// -inf where the query does not see the key. key and query are those of acc[0][0] in this lane.
template <int N>
__device__ __forceinline__ void apply_mask_transposed(float (&acc)[N][4], const Sequence& sequence,
                                                      int key, int query) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // begin <= query < end in one unsigned comparison; nobody sees a key past the end.
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
