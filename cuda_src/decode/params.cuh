// Kernel arguments of decode/. The host reads them here (runtime/structs.py).
#pragma once
#include "../attention/params.cuh"
#include "paged_rows.cuh"

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
  const void* k;            // [batch, tokens, heads, head_dim] or [rows, heads, head_dim]
  const void* v;            // like k
  void* k_cache;            // [num_pages, page_size, heads, head_dim]
  void* v_cache;            // like k_cache
  const int* positions;     // [batch] or [rows]; null with slots
  const int* page_table;    // [sequences, pages of a sequence], or null
  const int* sequences;     // like positions; null: i is of sequence i
  const int64_t* slots;     // [rows] or null: page * page_size + row, -1 for none
  const int* cu_seqlens_q;  // [batch + 1] or null: the rows of sequence i begin at cu_seqlens_q[i]
  float* k_scale;           // [num_pages, page_size, heads]; null unless the cache has 8 bits
  float* v_scale;           // like k_scale
  Strides k_strides;
  Strides v_strides;
  Strides k_cache_strides;  // of pages, rows and heads
  Strides v_cache_strides;
  Strides k_scale_strides;
  Strides v_scale_strides;
  PagedRows pages;
  int64_t rows;
  int batch;          // of packed rows
  int tokens;         // rows of a sequence; 0 where positions has one for each row, or packed
  int num_sequences;  // of the page table or the contiguous cache
  int heads;
  int head_dim;
  int computes_scales;
};

struct CacheGatherParams {
  const void* k_cache;    // [num_pages, page_size, heads, head_dim]
  const void* v_cache;    // like k_cache
  void* k;                // [batch, max_length, heads, head_dim], contiguous
  void* v;                // like k
  const int* lengths;     // [batch], the keys of each sequence
  const int* starts;      // [batch], the key of row 0; null: 0
  const int* page_table;  // [batch, pages of a sequence], or null
  const int* sequences;   // [batch], pages of a contiguous cache; null: page i is of sequence i
  const float* k_scale;   // [num_pages, page_size, heads]; null unless the cache has 8 bits
  const float* v_scale;   // like k_scale
  Strides k_cache_strides;
  Strides v_cache_strides;
  Strides k_scale_strides;
  Strides v_scale_strides;
  PagedRows pages;
  int blocks;  // of a sequence
  int max_length;
  int heads;
  int head_dim;
};

// Packed sequences have batch stride 0, and cu_seqlens_q gives the first row. For a cache of 8 bits
// k and v are its scales, float32 [num_pages, page_size, heads_kv]; the new keys are in the cache.
struct FlashDecodeParams {
  const void* q;            // [batch, seqlen, heads_q, head_dim]
  const void* k;            // [batch, seqlen, heads_kv, head_dim], the new keys; null: in the cache
  const void* v;            // [batch, seqlen, heads_kv, head_dim]
  void* k_cache;            // [num_pages, page_size, heads_kv, head_dim]
  void* v_cache;            // [num_pages, page_size, heads_kv, head_dim]
  void* out;                // [batch, seqlen, heads_q, head_dim]
  float* lse;               // [batch, heads_q, seqlen], packed: [heads_q, total_q]; or null
  const int* positions;     // [batch], the number of keys before the new tokens
  const int* page_table;    // [batch, pages of a sequence], or null
  const int* sequences;     // [batch], pages of a contiguous cache; null: page i is of sequence i
  const int* cu_seqlens_q;  // [batch + 1] or null
  const float* alibi_slopes;  // [batch, heads_q] or null
  const float* sinks;         // [heads_q] or null
  const int* leftpad;         // [batch], the first keys, which are none; or null
  void* parts;                // results of parts (flash_decode_merge.cuh)
  int* counters;              // as many as parts; 0 before and after
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides k_cache_strides;  // of pages, rows and heads
  Strides v_cache_strides;
  Strides out_strides;
  int64_t lse_batch_stride;
  int64_t lse_head_stride;
  int64_t alibi_batch_stride;
  PagedRows pages;
  int batch;
  int seqlen;  // the longest sequence when packed
  int heads_kv;
  int group;  // heads_q / heads_kv
  int head_dim;
  int appends;       // whether k and v are there and enter the cache; then `counted`
  int counted;       // whether the new tokens are keys, which lie behind `positions`
  int num_splits;    // parts of a unit (decode_work.cuh); 0: equal shares for all blocks
  int abreast;       // blocks of a team (decode_work.cuh); divides heads_kv; 1 with num_splits
  int window_left;   // keys before the diagonal that a token sees, at most 2^30
  int window_right;  // keys behind it; 0 is causal
  float scale_log2;  // log2(e) * scale of the scores, or log2(e) * softcap
  float to_tanh;     // scale / softcap; 0 without a softcap
};

struct SampleParams {
  const void* logits;  // [rows, columns]
  int* positions;      // [rows], the counter of the random numbers; null: 0
  int* tokens;         // [rows], the result; -1 for a row of no distribution
  int* next_tokens;    // [rows], the same without -1, and
  int* ends;           // [rows], with which positions advance by 1; both null: they do not
  const int* choices;  // [rows, CHOICE_WORDS], which say what the next four say; null: these do
  uint64_t seed;
  int64_t stride;  // of a row of logits
  int columns;
  int top_k;       // 0: all
  uint32_t top_p;  // of 2^32; 0: all
  int limit;       // the largest position
  float scale;     // log2(e) / temperature
};

// The words of a row of choices: the bits of scale (0 is greedy), top_k, top_p, the number that
// stands for the row in the counter of the random numbers, and the halves of the seed, low first.
constexpr int CHOICE_WORDS = 6;
