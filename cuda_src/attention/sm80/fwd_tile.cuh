// The tile of a block of the mma.sync forward kernels.
#pragma once
#include "../../ptx/math.cuh"
#include "../block_info.cuh"
#include "../tile_order.cuh"

// The tile of a block. It lives in shared memory, because the main loop needs all registers, and
// most of these fields are read once a tile or once a block.
template <typename T>
struct FwdBlock {
  Sequence sequence;
  TileRange n_range;
  int m_begin;
  int m_rows;  // <= 0: nothing to do
  const T* q;
  const T* k;
  const T* v;
  T* out;
  float* lse;
  float alibi_slope;
  float sink_log2;  // -inf for none
  int batch;
  int head;

  __device__ void locate(const FlashFwdParams& params, int block_m, int block_n) {
    const AttentionShape& shape = params.shape;
    const Tile tile = tile_of_block(blockIdx.x, ceil_div(shape.seqlen_q, block_m), shape.heads_q,
                                    shape.batch, shape.heads_per_section);
    sequence = load_sequence(params, tile.batch);
    m_begin = tile.block * block_m;
    m_rows = min(block_m, sequence.seqlen_q - m_begin);
    n_range = key_tiles(sequence, m_begin, m_begin + m_rows, block_n);
    const int head_kv = tile.head / (shape.heads_q / shape.heads_kv);
    const int64_t row_q = sequence.start_q + m_begin;
    q = static_cast<const T*>(params.q) + params.q_strides.at(tile.batch, row_q, tile.head);
    k = static_cast<const T*>(params.k) +
        params.k_strides.at(tile.batch, sequence.start_k, head_kv);
    v = static_cast<const T*>(params.v) +
        params.v_strides.at(tile.batch, sequence.start_k, head_kv);
    out = static_cast<T*>(params.out) + params.out_strides.at(tile.batch, row_q, tile.head);
    lse = params.lse + tile.batch * params.lse_batch_stride + tile.head * params.lse_head_stride +
          row_q;
    alibi_slope = params.alibi_slopes
                      ? params.alibi_slopes[tile.batch * params.alibi_batch_stride + tile.head]
                      : 0.f;
    sink_log2 = params.sinks ? params.sinks[tile.head] * LOG2E : -INF;
    batch = tile.batch;
    head = tile.head;
  }
};
