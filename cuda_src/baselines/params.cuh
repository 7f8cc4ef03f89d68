// Kernel arguments of baselines/. The host reads them here (runtime/structs.py).
#pragma once
#include "../common/types.cuh"

struct VectorAddParams {
  const void* a;
  const void* b;
  void* out;
  int64_t size;
};

// A row is one query of one head: row (b * seqlen_q + query) * heads + head of q and out, which are
// contiguous. k and v are too.
struct BaselineAttentionParams {
  const void* q;   // [batch, seqlen_q, heads, head_dim]
  const void* k;   // [batch, seqlen_k, heads, head_dim]
  const void* v;   // [batch, seqlen_k, heads, head_dim]
  void* out;       // [batch, seqlen_q, heads, head_dim]
  float* scores;   // [batch, seqlen_q, heads, seqlen_k], or null but in naive_attention
  float* acc;      // of flash_attention_1: like out; out itself where that is float32
  float* row_max;  // of flash_attention_1: [batch, seqlen_q, heads]
  float* row_sum;  // the same
  int64_t rows;    // batch * seqlen_q * heads
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t heads;
  int64_t head_dim;
  int causal;
  float scale;

  // Where the key or the value of a row's head begins.
  __device__ int64_t key_at(int64_t row, int64_t key) const {
    const int64_t batch = row / heads / seqlen_q;
    return ((batch * seqlen_k + key) * heads + row % heads) * head_dim;
  }

  // How many keys a query sees; the last query of a causal sequence sees all of them.
  __device__ int64_t keys_of_query(int64_t query) const {
    if (!causal) return seqlen_k;
    return min(seqlen_k, max(int64_t(0), query + seqlen_k - seqlen_q + 1));
  }

  __device__ int64_t keys_of_row(int64_t row) const {
    return keys_of_query(row / heads % seqlen_q);
  }
};
