// Where a share of the query heads of a key head leaves its dK and dV, in float32.
#pragma once
#include "params.cuh"

enum class KeyGradient { DK, DV };

// The first of the columns of row `row` of k (canonical: batch * seqlen_k + row, or the row of the
// packed tensor).
template <int HEAD_DIM>
__device__ __forceinline__ float* partial_gradient(const FlashBwdParams& params, KeyGradient which,
                                                   int share, int batch, int64_t row, int head_kv) {
  const AttentionShape& shape = params.shape;
  if (!params.cu_seqlens_k) row += int64_t(batch) * shape.seqlen_k;
  const int64_t part = static_cast<int>(which) * shape.group_shares + share;
  return params.dkv_partial +
         ((part * params.rows_k + row) * shape.heads_kv + head_kv) * int64_t(HEAD_DIM);
}
