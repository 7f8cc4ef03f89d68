// The tile of a block of the mma.sync backward kernels.
#pragma once
#include "../block_info.cuh"
#include "../tile_order.cuh"

// The tile of a block. It lives in shared memory for the reason that fwd_tile.cuh gives.
template <typename T>
struct BwdBlock {
  Sequence sequence;
  TileRange m_range;
  int n_block;
  int n_begin;
  int n_rows;  // <= 0: nothing to do
  int batch;
  int head_kv;
  int share;       // of the query heads of this key head
  int head_begin;  // those query heads
  int head_end;
  const T* q;  // the first query of this sequence in head 0
  const T* dout;
  const T* k;
  const T* v;
  T* dk;
  T* dv;

  __device__ void locate(const FlashBwdParams& params, int block_m, int block_n) {
    const AttentionShape& shape = params.shape;
    // For a deterministic sum blocks wait for each other, and a block may wait only for blocks that
    // run already. So the order of tiles is that in which the blocks begin.
    const int index = params.dq_semaphore ? atomicAdd(params.dq_semaphore, 1) : blockIdx.x;
    const int num_n_blocks = ceil_div(shape.seqlen_k, block_n);
    const Tile tile = tile_of_block(index, num_n_blocks, shape.heads_kv * params.shape.group_shares,
                                    shape.batch, shape.heads_per_section);
    sequence = load_sequence(params, tile.batch);
    n_block = num_n_blocks - 1 - tile.block;  // under a causal mask the first keys have most work
    n_begin = n_block * block_n;
    n_rows = min(block_n, sequence.seqlen_k - n_begin);
    m_range = query_tiles(sequence, n_begin, n_begin + n_rows, block_m);
    batch = tile.batch;
    const int group = shape.heads_q / shape.heads_kv;
    head_kv = tile.head / params.shape.group_shares;
    share = tile.head % params.shape.group_shares;
    head_begin = head_kv * group + share * group / params.shape.group_shares;
    head_end = head_kv * group + (share + 1) * group / params.shape.group_shares;
    const int64_t row_k = sequence.start_k + n_begin;
    q = static_cast<const T*>(params.q) + params.q_strides.at(batch, sequence.start_q, 0);
    dout = static_cast<const T*>(params.dout) + params.dout_strides.at(batch, sequence.start_q, 0);
    k = static_cast<const T*>(params.k) + params.k_strides.at(batch, row_k, head_kv);
    v = static_cast<const T*>(params.v) + params.v_strides.at(batch, row_k, head_kv);
    dk = static_cast<T*>(params.dk) + params.dk_strides.at(batch, row_k, head_kv);
    dv = static_cast<T*>(params.dv) + params.dv_strides.at(batch, row_k, head_kv);
  }
};
