// What the sm_90 backward kernels share: the tile of a block, its barriers, the producer, and the
// place of dQ in its accumulator.
#pragma once
#include "../common/params.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "block_info.cuh"
#include "ring.cuh"
#include "smem_tile.cuh"
#include "tensor_rows.cuh"
#include "tile_order.cuh"

// The keys of a block, and the queries that see them.
struct BwdTile {
  Sequence sequence;
  TileRange m_range;
  int n_block;
  int n_begin;
  int n_rows;  // <= 0: nothing to do
  int batch;
  int head_kv;
  int head_begin;  // the query heads that share this key head
  int head_end;

  __device__ bool has_queries() const { return m_range.begin < m_range.end; }

  __device__ void locate(const FlashBwdParams& params, int block_m, int block_n) {
    const AttentionShape& shape = params.shape;
    // A repeatable sum makes blocks wait for each other, and a block may wait only for one that
    // runs already: so the order is the order of arrival.
    const int index = params.dq_semaphore ? atomicAdd(params.dq_semaphore, 1) : blockIdx.x;
    const int num_n_blocks = ceil_div(shape.seqlen_k, block_n);
    const Tile tile =
        tile_of_block(index, num_n_blocks, shape.heads_kv, shape.batch, shape.heads_per_section);
    sequence = load_sequence(shape, tile.batch, params.cu_seqlens_q, params.cu_seqlens_k);
    n_block = num_n_blocks - 1 - tile.block;  // the first keys are seen by most queries
    n_begin = n_block * block_n;
    n_rows = min(block_n, sequence.seqlen_k - n_begin);
    m_range = query_tiles(sequence, n_begin, n_begin + n_rows, block_m);
    // Keys past the end arrive as zeros, and the probability of a score 0 can overflow: then dS is
    // not finite, and neither is its product with the zeros of K. So they need the mask.
    if (n_rows < block_n) m_range.inner_end = m_range.inner_begin;
    batch = tile.batch;
    head_kv = tile.head;
    const int group = shape.heads_q / shape.heads_kv;
    head_begin = tile.head * group;
    head_end = head_begin + group;
  }
};

template <int BLOCK_M, int STAGES>
struct BwdShared {
  BwdTile tile;
  uint64_t kv_full;
  RingBarriers<STAGES> q;     // Q and lse_log2
  RingBarriers<STAGES> dout;  // dO and delta
  alignas(16) float lse_log2[STAGES][BLOCK_M];
  alignas(16) float delta[STAGES][BLOCK_M];

  __device__ void init(const FlashBwdParams& params, int block_n, int consumers) {
    tile.locate(params, BLOCK_M, block_n);
    mbarrier_init(smem_address(&kv_full), 1);
    q.init(consumers);
    dout.init(consumers);
    mbarrier_init_fence();
  }
};

// The first row of a query tile in lse_log2, delta, dq_accum.
__device__ __forceinline__ int64_t accum_row(const FlashBwdParams& params, const BwdTile& tile,
                                             int head, int m_begin) {
  return head * params.accum_rows + tile.sequence.accum_start + m_begin;
}

// The order of dQ in dq_accum: 64 rows after 64 rows; of those, eight columns after eight; of
// those, the fragments of a warpgroup (ptx/wgmma.cuh), four floats a thread.
__device__ __forceinline__ int dq_fragment_offset(int octet) {
  return (octet * WARPGROUP + threadIdx.x % WARPGROUP) * 4;
}

// The number of key tiles that must have added to a query tile before this one, and the flag that
// counts them; element 0 of the semaphore is the ticket counter.
__device__ __forceinline__ int turn_of_tile(const BwdTile& tile, int m_begin, int block_m,
                                            int block_n) {
  const int row_end = min(tile.sequence.seqlen_q, m_begin + block_m);
  return tile.n_block - key_tiles(tile.sequence, m_begin, row_end, block_n).begin;
}
__device__ __forceinline__ int* turn_flag(const FlashBwdParams& params, int64_t accum_row,
                                          int block_m) {
  return params.dq_semaphore + 1 + accum_row / block_m;
}

// The producer, one lane: K and V once, then Q and dO of every query tile into their rings.
template <class TileQ, class TileKV, int STAGES>
__device__ __forceinline__ void load_bwd_tiles(const FlashBwdSm90Params& params,
                                               BwdShared<TileQ::ROWS, STAGES>& shared,
                                               uint32_t smem_k, uint32_t smem_v, uint32_t smem_q,
                                               uint32_t smem_dout) {
  const BwdTile& tile = shared.tile;
  if (!tile.has_queries()) return;
  const AttentionShape& shape = params.base.shape;
  const Sequence& sequence = tile.sequence;
  const auto rows_of = [&](const TensorMap& map, int which, int64_t start) {
    return TensorRows(map, params.sequence_maps, which, shape, tile.batch, start);
  };
  const TensorRows q = rows_of(params.q_map, 0, sequence.start_q);
  const TensorRows k = rows_of(params.k_map, 1, sequence.start_k);
  const TensorRows v = rows_of(params.v_map, 2, sequence.start_k);
  const TensorRows dout = rows_of(params.dout_map, 3, sequence.start_q);

  const uint32_t kv_full = smem_address(&shared.kv_full);
  mbarrier_arrive_expect(kv_full, 2 * TileKV::BYTES);
#pragma unroll
  for (int block = 0; block < TileKV::NUM_BLOCKS; ++block) {
    const uint32_t offset = block * TileKV::BLOCK_BYTES;
    k.load(smem_k + offset, kv_full, block, tile.n_begin, tile.head_kv);
    v.load(smem_v + offset, kv_full, block, tile.n_begin, tile.head_kv);
  }

  Ring<STAGES> ring;
  const auto load = [&](const TensorRows& rows, uint32_t tiles, RingBarriers<STAGES>& barriers,
                        const float* floats, const void* smem_floats, int row, int head) {
    constexpr uint32_t FLOAT_BYTES = TileQ::ROWS * sizeof(float);
    barriers.wait_empty(ring);
    const uint32_t full = smem_address(&barriers.full[ring.stage]);
    mbarrier_arrive_expect(full, TileQ::BYTES + FLOAT_BYTES);
#pragma unroll
    for (int block = 0; block < TileQ::NUM_BLOCKS; ++block) {
      rows.load(tiles + ring.stage * TileQ::BYTES + block * TileQ::BLOCK_BYTES, full, block, row,
                head);
    }
    bulk_load(smem_address(smem_floats), floats + accum_row(params.base, tile, head, row),
              FLOAT_BYTES, full);
  };
#pragma unroll 1
  for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
    for (int m = tile.m_range.begin; m < tile.m_range.end; ++m) {
      load(q, smem_q, shared.q, params.base.lse_log2, shared.lse_log2[ring.stage], m * TileQ::ROWS,
           head);
      load(dout, smem_dout, shared.dout, params.base.delta, shared.delta[ring.stage],
           m * TileQ::ROWS, head);
      ring.advance();
    }
  }
}
