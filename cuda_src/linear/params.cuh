// Kernel arguments of linear/. The host reads them here (runtime/structs.py).
#pragma once
#include "../common/types.cuh"

// LayerNorm or RMSNorm of the rows of x, where a kernel has it in its prologue.
struct RowNorm {
  float eps;
  float inverse_depth;  // 1 / depth
  int rms;
  int wide;  // whether weight and bias are float32, not T
};

// Rotary embedding of the first `rotary_dim` numbers of each head of q and k.
struct Rotary {
  int64_t seqlen;         // row r has position r % seqlen, unless positions are given
  int64_t num_positions;  // rows of cos and sin
  int columns;            // those of q and k, which come first; 0: no rotary embedding
  int head_dim;
  int rotary_dim;
  int interleaved;     // pairs are (2 i, 2 i + 1), not (i, i + rotary_dim / 2)
  int wide;            // whether cos and sin are float32, not T
  int wide_positions;  // whether positions are 64-bit, not 32-bit
};

// out = activation(norm(x) weight^T + bias) + residual; with a gate
// activation(norm(x) gate_weight^T + gate_bias) * (norm(x) weight^T + bias) + residual.
struct LinearParams {
  const void* x;            // [rows, depth]
  const void* weight;       // [columns, depth]
  const void* gate_weight;  // [columns, depth] or null
  const void* bias;         // [columns] or null
  const void* gate_bias;    // [columns] or null
  const void* residual;     // [rows, columns] or null
  const void* norm_weight;  // [depth], or null: no norm
  const void* norm_bias;    // [depth] or null
  const void* cos;          // [num_positions, rotary_dim / 2] or null
  const void* sin;          // like cos
  const void* positions;    // [rows] or null
  void* out;                // [rows, columns]
  int64_t x_stride;         // of rows, in elements, as those that follow
  int64_t weight_stride;
  int64_t gate_stride;
  int64_t residual_stride;
  int64_t out_stride;
  int64_t rows;
  int columns;
  int depth;
  RowNorm norm;
  Rotary rotary;
};

// sm_90: tensor maps of (columns, rows, 1, 1) in front; those of what is null are not used.
struct alignas(64) LinearSm90Params {
  TensorMap x_map;
  TensorMap weight_map;
  TensorMap gate_weight_map;
  TensorMap residual_map;
  TensorMap out_map;
  LinearParams base;
};

// The same for small M, whose results are stored one by one.
struct alignas(64) LinearSmallMSm90Params {
  TensorMap x_map;
  TensorMap weight_map;
  TensorMap gate_weight_map;
  LinearParams base;
  int stages;  // of the ring
};

// out = activation(gate) * up, and its gradients; dense arrays of `size` elements.
struct GateParams {
  const void* gate;
  const void* up;
  const void* dout;  // null forward
  void* out;         // null backward, as the two that follow are forward
  void* dgate;
  void* dup;
  int64_t size;
};

// q and k are normalised and rotated in place, head by head; strides are in elements.
struct HeadNormParams {
  void* q;               // [rows, heads_q, head_dim], the last dimension contiguous
  void* k;               // [rows, heads_k, head_dim]
  const void* q_weight;  // [head_dim]
  const void* k_weight;  // [head_dim]
  const float* cos;      // [num_positions, head_dim / 2]
  const float* sin;      // like cos
  const int* positions;  // [rows]; one outside of the table is taken as the nearest one inside
  int64_t q_row;
  int64_t q_head;
  int64_t k_row;
  int64_t k_head;
  int64_t rows;
  int64_t num_positions;
  int heads_q;
  int heads_k;
  int head_dim;
  float eps;
};
