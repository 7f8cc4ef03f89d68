// Kernel arguments of float32 attention by three float16 products (fp16x3_split.cu).
#pragma once
#include "../params.cuh"

// The tensors that are split, numbered from 0.
enum class SplitTensor { Q, K, V, DOUT };

// The magnitudes in a key head and in the query heads that read it, of one sequence. All are the
// bits of non-negative floats, which are ordered as the floats are; those of NaN come last.
struct HeadRange {
  uint32_t max[4];          // of a SplitTensor
  uint32_t not_min[4];      // complement of the smallest of the maxima of its rows, without zeros
  uint32_t square_norm[4];  // the largest squared 2-norm of a row, after scaling
  uint32_t delta;           // the largest delta of a query
  uint32_t unused[3];
};

// The float16 parts of the tensors, [parts][heads][rows][HEAD_DIM]: the high parts, then the low
// parts. Sequences that are not packed follow each other.
struct SplitInputs {
  HeadRange* ranges;  // [batch, heads_kv]
  half_t* q;
  half_t* k;
  half_t* v;
  half_t* dout;  // null in the forward pass
  // [batch]: the lengths of the sequences that the kernels for CUDA cores compute, 0 for the others
  int* left_q;
  int* left_k;
  int64_t rows_q;
  int64_t rows_k;
};

struct Fp16x3SplitParams {
  const float* q;
  const float* k;
  const float* v;
  const float* dout;   // null in the forward pass
  const float* delta;  // as in FlashBwdParams; null in the forward pass
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const int* seqused_q;
  const int* seqused_k;
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides dout_strides;
  int64_t accum_rows;  // as in FlashBwdParams
  AttentionShape shape;
  SplitInputs split;
};

struct Fp16x3FwdParams {
  FlashFwdParams base;
  SplitInputs split;
};

struct Fp16x3BwdParams {
  FlashBwdParams base;
  SplitInputs split;
};
