// Kernel arguments of decode/. The host reads them here (runtime/structs.py).
#pragma once
#include "../attention/params.cuh"

struct EmbeddingParams {
  const int* tokens;            // [rows]
  const int* positions;         // [rows]; null: without position_weight
  const void* token_weight;     // [vocabulary, columns]
  const void* position_weight;  // [context, columns]
  void* out;                    // [rows, columns]
  int64_t rows;
  int columns;
  int vocabulary;
  int context;
};

struct CacheAppendParams {
  const void* k;         // [rows, columns]
  const void* v;         // [rows, columns]
  void* k_cache;         // [batch, max_length, columns]
  void* v_cache;         // [batch, max_length, columns]
  const int* sequences;  // [rows]; null: row i is of sequence i
  const int* positions;  // [rows]
  int64_t rows;
  int64_t k_stride;  // of a row
  int64_t v_stride;
  int columns;  // heads * head_dim
  int batch;
  int max_length;
};

struct FlashDecodeParams {
  const void* q;         // [batch, seqlen, heads_q, head_dim]
  const void* k;         // [batch, seqlen, heads_kv, head_dim]
  const void* v;         // [batch, seqlen, heads_kv, head_dim]
  void* k_cache;         // [batch, max_length, heads_kv, head_dim]
  void* v_cache;         // [batch, max_length, heads_kv, head_dim]
  void* out;             // [batch, seqlen, heads_q, head_dim]
  const int* positions;  // [batch], the place of the first new key and value
  void* parts;           // results of the splits (flash_decode_merge.cuh); null with one split
  int* counters;         // one for each key head and eight queries; 0 before and after
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides k_cache_strides;
  Strides v_cache_strides;
  Strides out_strides;
  int seqlen;
  int heads_kv;
  int group;  // heads_q / heads_kv
  int head_dim;
  int max_length;
  int splits;        // the most splits of the keys among clusters
  float scale_log2;  // log2(e) * scale of the scores
};

struct SampleParams {
  const void* logits;  // [rows, columns]
  int* positions;      // [rows], the counter of the random numbers; null: 0
  int* tokens;         // [rows], the result; -1 for a row of no distribution
  int* next_tokens;    // [rows], the same without -1, and
  int* ends;           // [rows], with which positions advance by 1; both null: they do not
  uint64_t seed;
  int64_t stride;  // of a row of logits
  int columns;
  int top_k;       // 0: all
  uint32_t top_p;  // of 2^32; 0: all
  int limit;       // the largest position
  float scale;     // log2(e) / temperature
};
