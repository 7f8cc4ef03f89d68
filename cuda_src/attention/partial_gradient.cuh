// The place in dkv_partial, in float32, of the dK and dV of one share of the query heads of a key
// head.
#pragma once
#include "params.cuh"

enum class KeyGradient { DK, DV };

// Returns the address of the first column of a row of k. `row` counts within the sequence, or
// within the packed tensor.
template <int HEAD_DIM>
__device__ __forceinline__ float* partial_gradient(const FlashBwdParams& params, KeyGradient which,
                                                   int share, int batch, int64_t row, int head_kv) {
  const AttentionShape& shape = params.shape;
  if (!params.cu_seqlens_k) row += int64_t(batch) * shape.seqlen_k;
  const int64_t part = static_cast<int>(which) * shape.group_shares + share;
  return params.dkv_partial +
         ((part * params.rows_k + row) * shape.heads_kv + head_kv) * int64_t(HEAD_DIM);
}
