// The rows of dQ that a block of a flash_bwd_postprocess kernel converts: BLOCK_M of one head, or
// fewer at the end of a sequence, or none where a sequence is shorter than the longest one.
#pragma once
#include "block_info.cuh"
#include "tile_order.cuh"

struct DqRows {
  int batch, head;
  int count;           // not positive if there are none
  const float* accum;  // the first one in dq_accum
  int64_t place;       // of the first one in dq
};

template <int HEAD_DIM, int BLOCK_M>
__device__ __forceinline__ DqRows dq_rows_of_block(const FlashBwdParams& params) {
  const AttentionShape& shape = params.shape;
  const Tile tile =
      tile_of_block(blockIdx.x, ceil_div(shape.seqlen_q, BLOCK_M), shape.heads_q, shape.batch, 1);
  const Sequence sequence = load_sequence(params, tile.batch);
  const int begin = tile.block * BLOCK_M;
  const int64_t row = tile.head * params.accum_rows + sequence.accum_start + begin;
  return {tile.batch, tile.head, min(BLOCK_M, sequence.seqlen_q - begin),
          params.dq_accum + row * HEAD_DIM,
          params.dq_strides.at(tile.batch, sequence.start_q + begin, tile.head)};
}
