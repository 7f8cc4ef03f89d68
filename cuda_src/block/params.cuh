// Kernel arguments of decode_stack. The host reads them here (runtime/structs.py).
#pragma once
#include "../common/types.cuh"

// The weights of a block, matrices as (out_features, in_features) with contiguous rows.
struct BlockPointers {
  const void* ln1_weight;   // [width]
  const void* ln1_bias;     // [width]
  const void* qkv_weight;   // [3 * width, width]: rows of q, then k, then v
  const void* qkv_bias;     // [3 * width]
  const void* proj_weight;  // [width, width]
  const void* proj_bias;    // [width]
  const void* ln2_weight;   // [width]
  const void* ln2_bias;     // [width]
  const void* up_weight;    // [hidden, width]
  const void* up_bias;      // [hidden]
  const void* down_weight;  // [width, hidden]
  const void* down_bias;    // [width]
};

// Element strides of a (layers, batch, max_length, heads, head_dim) cache.
struct CacheStrides {
  int64_t layer;
  int64_t batch;
  int64_t row;
  int64_t head;

  __device__ int64_t at(int64_t l, int64_t b, int64_t r, int64_t h) const {
    return l * layer + b * batch + r * row + h * head;
  }
};

struct DecodeStackParams {
  const void* x;      // [batch, width]; null: the embeddings of the tokens
  const int* tokens;  // [batch] or null
  void* k_cache;      // [layers, batch, max_length, heads, head_dim]
  void* v_cache;
  int* lengths;      // [batch]: tokens in the caches before this one
  void* out;         // [batch, width] or null
  float* logits;     // [batch, vocab] or null
  int* next_tokens;  // [batch] or null: where the largest logit is
  const BlockPointers* layers;
  const void* final_weight;     // [width]: the last norm; null with all that follow, if x goes in
  const void* final_bias;       // [width]
  const void* head_weight;      // [vocab, width]
  const void* token_embedding;  // [vocab, width]
  const void* position_embedding;  // [positions, width]
  int* barrier;                    // 0 between launches
  // The words by which blocks exchange numbers. They are 0 at first, and then serve one launch of
  // the same shape after the other. The first four are words of tagged_words.cuh, three of them
  // with row_words() and COPIES.
  float* residual;      // [batch, width]: x after each half of a transformer block
  float* hidden;        // [batch, hidden]
  float* attended;      // [batch, heads, splits, head_dim + 4]: attention to a share of the keys,
                        // and four times log2 of the sum of its exponentials
  float* qkv;           // [batch, 3 * width]
  float* segment_sums;  // [batch, width]: the residual after some of the segments
  uint64_t* best;       // [blocks, MAX_BATCH]: largest logit of a block, and where
  uint32_t* launches;   // the number of launches before this one
  CacheStrides k_strides;
  CacheStrides v_strides;
  int64_t x_stride;
  int64_t copy_words;  // from a copy of residual, hidden and attended to the next
  int num_layers;
  int batch;
  int width;
  int hidden_width;
  int segments;  // of a row of down_weight, which are computed one after the other
  int segment;   // columns of a segment; the last may have less
  int heads;
  int head_dim;
  int max_length;
  int vocab;
  int positions;
  int splits;   // shares of the keys of a head, at most MAX_BATCH / 2^ceil(log2(batch))
  int advance;  // add 1 to the lengths in the end
  float eps;
  float scale_log2;        // of scores: log2(e) / sqrt(head_dim)
  uint32_t heads_inverse;  // for `quotient`
  uint32_t head_dim_inverse;
  uint32_t splits_inverse;
};

constexpr int MAX_BATCH = 8;    // columns of an mma tile
constexpr int MAX_LAYERS = 64;  // whose pointers are in shared memory
