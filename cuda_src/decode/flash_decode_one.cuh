// A decode step of attention as in flash_decode.cu and flash_decode_narrow.cu, for one sequence
// with up to ROWS queries of a key head. Such a step takes microseconds, of which reading keys is
// the smaller part: most go into accesses of memory that depend on each other, and into reading the
// instructions, which come from memory too. So these kernels have few of both:
//
// - Blocks have neighbouring key heads, as in decode_work.cuh, and one segment each: one of
//   `num_splits` parts of the keys of a head. Parts are equal in rounds; the last ones may be
//   empty.
// - Every thread finds the segment from the length, without shared memory.
//
// Why nothing is overwritten while it is read: shared memory is written once, but for the flag of
// merge_levels(), which two barriers separate. No block waits for another.
//
// Source: as flash_decode.cu.
#pragma once
#include "flash_decode_block.cuh"

// Sets s to the part of this block, except for `parts`. Returns whether there is one.
template <int KEYS>
__device__ __forceinline__ bool set_part(Segment& s, const FlashDecodeParams& params) {
  s.batch = 0;
  s.part = blockIdx.x / uint32_t(params.heads_kv);
  s.kv_head = opaque(int(blockIdx.x) - s.part * params.heads_kv);  // before the length is there
  s.sequence.load<KEYS>(params, 0);
  s.first_row = 0;
  s.rows = s.sequence.tokens * params.group;
  s.set_inner(params, 0, s.sequence.tokens - 1);
  const uint32_t rounds = s.sequence.rounds(), splits = params.num_splits;
  const uint32_t share = (rounds + splits - 1) / splits;
  s.end = rounds, s.share = share;
  s.set_chunks(s.part * share, (s.part + 1) * share);
  s.first_slot = s.kv_head * params.num_splits, s.slot_stride = 1;
  return s.rows > 0 && s.part * share < rounds;
}

template <class Block>
__device__ __forceinline__ void decode_one(const FlashDecodeParams& params,
                                           typename Block::Storage& storage) {
  launch_next_kernel();
  const Block block{{params}, storage};
  Segment s;
  if (!set_part<Block::KEYS>(s, params)) {
    if (blockIdx.x == 0) wait_for_previous_kernel();  // one block of a grid must, the others may
    return;
  }
  if constexpr (Block::NARROW) block.prefetch(s);
  typename Block::Tiles tiles;
  if (!params.appends || block.starts_new(s)) wait_for_previous_kernel();
  const RowPlace next = block.begin(s, tiles);
  s.parts = ceil_div(s.end, s.share);
  wait_for_previous_kernel();
  block.stage_queries(s);
  __syncthreads();  // the queries are in shared memory

  QueryPair<Block::TILES> queries[Block::QUERY_TILES];
  float o[Block::QUERY_TILES][Block::BLOCKS][4][4] = {};
  typename Block::Range range;
  block.attend(s, tiles, next, o, queries, range);
#pragma unroll
  for (int n = 0; n < Block::QUERY_TILES; ++n)
    block.store_warp(n * 8, o[n], queries[n], range.out_factor());
  __syncthreads();  // the results of all warps are written
  merge_levels(
      storage.warps, block.parts(), params.counters, s, storage.last[0],
      [&](int row, int column, const float (&out)[4], Sum sum) {
        block.write(s, row, column, out, sum);
      },
      [&] {
        if constexpr (!Block::NARROW) block.append(s);
      });
}
