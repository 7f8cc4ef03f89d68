// Kernel arguments of attention, one struct a pass. These are their only definitions: the host
// reads them from this file (runtime/structs.py).
#pragma once
#include "../common/types.cuh"
#include "sm90/key_pages.cuh"
#include "text.cuh"

// Element strides of a (batch, row, head, head_dim) tensor whose last dimension is contiguous.
// Packed sequences (varlen) have batch stride 0: cu_seqlens gives the first row.
struct Strides {
  int64_t batch;
  int64_t row;
  int64_t head;

  __device__ int64_t at(int64_t b, int64_t r, int64_t h) const {
    return b * batch + r * row + h * head;
  }
};

// Element strides of a (batch, heads_q, seqlen_q, seqlen_k) bias; 0 on the axes it is broadcast on.
struct BiasStrides {
  int64_t batch;
  int64_t head;
  int64_t row;
  int64_t col;

  __device__ int64_t at(int64_t b, int64_t h) const { return b * batch + h * head; }
};

// The shapes and the parameters of the score, which forward and backward share.
struct AttentionShape {
  int batch;
  int heads_q;
  int heads_kv;
  int seqlen_q;  // the longest sequence when packed
  int seqlen_k;
  int head_dim;
  int window_left;   // keys to the left of the diagonal that a query sees; seqlen_q + seqlen_k: all
  int window_right;  // keys to the right; 0 is causal
  int top_left;      // the diagonal starts at (0, 0); otherwise it ends at (seqlen_q, seqlen_k)
  int heads_per_section;  // tile order: see tile_order.cuh
  // The backward pass shares the query heads of a key head out over this many blocks; kernels of
  // sm_90 also take a multiple of these heads, and share the rows of each out. If there are two or
  // more blocks, each stores its sums in dkv_partial, and flash_bwd_combine adds them up.
  int group_shares;
  float scale;            // scores are scale * q.k
  float softcap;          // then softcap * tanh(score / softcap), unless 0
  int dropout_threshold;  // a weight stays if its 16 random bits are >= this; 0 keeps all
  float dropout_scale;    // factor of the weights that stay: 1 / (1 - dropout_threshold / 2^16)
};

// Both structs begin with what a text needs, if the kernel has one (text.cuh): the bits of the
// tiles of its mask, and its captures.
struct FlashFwdParams : MaskTiles, Captures {
  const void* q;  // [batch, seqlen_q, heads_q, head_dim]
  const void* k;  // [batch, seqlen_k, heads_kv, head_dim]
  const void* v;  // [batch, seqlen_k, heads_kv, head_dim]
  void* out;      // [batch, seqlen_q, heads_q, head_dim]
  float* lse;     // [batch, heads_q, seqlen_q], packed: [heads_q, total_q]; natural log; or null
  const int* cu_seqlens_q;    // [batch + 1] or null
  const int* cu_seqlens_k;    // [batch + 1] or null
  const float* alibi_slopes;  // [batch, heads_q] or null
  const void* bias;           // [batch, heads_q, seqlen_q, seqlen_k], broadcast by strides, or null
  const float* sinks;         // [heads_q] or null: a logit beside those of the keys
  const int64_t* dropout_seed;  // [1], or null without dropout
  const int* seqused_q;         // [batch] or null: valid rows of each sequence
  const int* seqused_k;         // [batch] or null
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides out_strides;
  int64_t lse_batch_stride;
  int64_t lse_head_stride;
  int64_t alibi_batch_stride;
  BiasStrides bias_strides;
  AttentionShape shape;
};

struct FlashBwdParams : MaskTiles, Captures {
  const void* dout;  // like out
  const void* q;
  const void* k;
  const void* v;
  const void* out;
  const float* lse;
  void* dq;
  void* dk;
  void* dv;
  const float* dlse;   // like lse, or null for 0
  float* lse_log2;     // [heads_q, accum_rows]: lse * log2(e); +inf if lse is -inf or for padding
  float* delta;        // [heads_q, accum_rows]: sum of dout * out over the head dimension, - dlse
  float* dq_accum;     // [heads_q, accum_rows, HEAD_DIM] in the fragment order of the main kernel;
                       // a place for each block where blocks take whole heads
  float* dkv_partial;  // [2, group_shares, rows_k, heads_kv, HEAD_DIM]: dK, dV of a share, or null;
                       // afterwards the shares of dbias (flash_bwd_dbias_sm80.cu)
  int* dq_semaphore;   // [1 + heads_q * accum_rows / 16] zeros for a deterministic sum, or null
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const float* alibi_slopes;
  const void* bias;
  const float* sinks;
  const int64_t* dropout_seed;
  const int* seqused_q;
  const int* seqused_k;
  float* dbias;   // like bias; zeros, to which the gradient is added, or null; in the dtype of q
                  // where it is stored (sm90/stored_gradient.cuh)
  float* dsinks;  // [heads_q] or null
  Strides dout_strides;
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides out_strides;
  Strides dq_strides;
  Strides dk_strides;
  Strides dv_strides;
  int64_t lse_batch_stride;
  int64_t lse_head_stride;
  int64_t alibi_batch_stride;
  BiasStrides bias_strides;
  BiasStrides dbias_strides;
  int64_t accum_rows;  // rows of all sequences, each padded to ACCUM_ROW_ALIGN
  int64_t rows_k;      // rows of k of all sequences
  AttentionShape shape;
};

// A tile of a packed sequence.
struct PackedTile {
  int batch;
  int block;  // its number along the sequence
};

// The arguments of the sm_90 kernels begin with tensor maps of (head_dim, rows, heads, batch), in
// which packed sequences are a batch of one. If sequences have lengths of their own, sequence_maps
// [map][batch] has such maps for each sequence, and packed_tiles lists the tiles of a head (see
// tile_order.cuh); otherwise both are null. bias_map is the map of a bias that TMA loads,
// (seqlen_k, seqlen_q, heads_q, batch) with length 1 on the axes that it is broadcast on; otherwise
// it is zeros. With keys in pages (sm90/key_pages.cuh) the maps of K and V are those of the cache,
// and two of the maps of each sequence are of pages of V.
struct alignas(64) FlashFwdSm90Params : KeyPages {
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
  TensorMap out_map;
  FlashFwdParams base;
  const TensorMap* sequence_maps;
  const PackedTile* packed_tiles;
  uint32_t* tile_counter;  // see tile_order.cuh, or null
  // With num_splits > 1 the keys of each tile are divided among num_splits blocks. Their partial
  // results are [split][row], with rows as in lse: HEAD_DIM columns of the output, and a maximum
  // and a sum. With one split these pointers are not used.
  float* partial_out;
  float2* partial_sums;
  int64_t partial_rows;
  int num_splits;
  TensorMap bias_map;
};

struct alignas(64) FlashBwdSm90Params {
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
  TensorMap dout_map;
  FlashBwdParams base;
  const TensorMap* sequence_maps;
  const PackedTile* packed_tiles;
  uint32_t* tile_counter;
  TensorMap bias_map;
};

struct alignas(64) SequenceMapsParams : KeyPages {
  TensorMap maps[4];  // of q, k, v, and out or dout
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const int* seqused_q;
  const int* seqused_k;
  TensorMap* sequence_maps;
  PackedTile* packed_tiles;
  AttentionShape shape;
  int max_tiles;  // in packed_tiles
  int tile_rows;
  int tiles_of_keys;  // 1: the tiles are of keys; 0: of queries
};

// Every sequence starts at a multiple of this in the accumulators, so that a query tile (whose
// height divides it) never straddles two sequences.
constexpr int ACCUM_ROW_ALIGN = 128;
