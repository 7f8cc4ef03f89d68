// The tile of a block of flash_bwd_simt.cu, and the turns in which blocks add to dQ.
#pragma once
#include "../block_info.cuh"
#include "../tile_order.cuh"
#include "tile.cuh"

// The tile of a block. It lives in shared memory, like the matrices, to spare registers.
template <typename T>
struct SimtBwdBlock {
  Sequence sequence;
  TileRange m_range;
  int n_block;
  int n_rows;  // <= 0: nothing to do
  int batch;
  int head_kv;
  SequenceRows<const T> q, dout, k, v;

  __device__ void locate(const FlashBwdParams& params, int block_m, int block_n) {
    const AttentionShape& shape = params.shape;
    // For a deterministic sum blocks wait for each other, and a block may wait only for blocks that
    // run already. So the order of tiles is that in which the blocks begin.
    const int index = params.dq_semaphore ? atomicAdd(params.dq_semaphore, 1) : blockIdx.x;
    const int num_n_blocks = ceil_div(shape.seqlen_k, block_n);
    const Tile tile =
        tile_of_block(index, num_n_blocks, shape.heads_kv, shape.batch, shape.heads_per_section);
    sequence = load_sequence(params, tile.batch);
    n_block = num_n_blocks - 1 - tile.block;  // under a causal mask the first keys have most work
    const int n_begin = n_block * block_n;
    n_rows = min(block_n, sequence.seqlen_k - n_begin);
    m_range = query_tiles(sequence, n_begin, n_begin + n_rows, block_m);
    batch = tile.batch;
    head_kv = tile.head;
    q.locate(params.q, params.q_strides, batch, sequence.start_q, shape);
    dout.locate(params.dout, params.dout_strides, batch, sequence.start_q, shape);
    k.locate(params.k, params.k_strides, batch, sequence.start_k, shape);
    v.locate(params.v, params.v_strides, batch, sequence.start_k, shape);
  }
};

// The turn in which a block adds to dQ of query tile m: the number of key tiles that do so before.
template <class Block>
__device__ __forceinline__ int turn_of_block(const Block& block, int m, int block_m, int block_n) {
  const int row_end = min(block.sequence.seqlen_q, (m + 1) * block_m);
  return block.n_block - key_tiles(block.sequence, m * block_m, row_end, block_n).begin;
}
