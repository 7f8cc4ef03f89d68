// The block of the sm_90 backward kernel for wide heads: its tiles in shared memory, the turns in
// which blocks add to dQ, and the reducer.
#pragma once
#include "bwd_turns.cuh"

enum class NamedBarrier {
  P_WRITTEN = 1,
  DS_WRITTEN,
  DK_EXCHANGED,
  DQ_EMPTY,  // the first of four, one for each buffer of dQ
  DQ_FULL = DQ_EMPTY + 4
};

// How dQ gets to its accumulator. REGISTERS: the consumers add it from registers. Otherwise the
// copy engine adds it from shared memory, where a warpgroup has one buffer for either part of its
// dQ (STAGED_BY_PART), which for warpgroup 0 may be the place of P (STAGED_IN_P), or a buffer for
// each part (STAGED).
enum class DqPath { REGISTERS, STAGED_IN_P, STAGED_BY_PART, STAGED };

// The two parts of the columns of dQ that a warpgroup computes, one after the other.
enum Part { FIRST, SECOND };

// The tiles of a block and their places in dynamic shared memory, and the shares of a warpgroup.
template <int HEAD_DIM_, int HEAD_DIM_V_, int BLOCK_M_, int BLOCK_N_, int STAGES_, int GROUPS_,
          bool WALKS_UP>
struct BwdWideLayout {
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int BLOCK_N = BLOCK_N_;
  static constexpr int STAGES = STAGES_;
  static constexpr int GROUPS = GROUPS_;  // consumer warpgroups
  static constexpr int CONSUMERS = GROUPS * WARPGROUP;
  static constexpr int KEYS = BLOCK_N / GROUPS;          // keys of S and dP a warpgroup
  static constexpr int SLICES = HEAD_DIM / 64 / GROUPS;  // slices of 64 head_dim rows a warpgroup
  // The last slice of dK^T, if the warpgroups do not divide them evenly: all compute it, each with
  // its share of the queries.
  static constexpr bool SHARED_SLICE = HEAD_DIM / 64 % GROUPS != 0;
  static constexpr int DK_SLICES = SLICES + SHARED_SLICE;
  using TileK = SmemTile<BLOCK_N, HEAD_DIM>;
  using TileV = SmemTile<BLOCK_N, HEAD_DIM_V>;
  using TileQ = SmemTile<BLOCK_M, HEAD_DIM>;
  using TileDout = SmemTile<BLOCK_M, HEAD_DIM_V>;
  using TileS = SmemTile<BLOCK_M, round_up(BLOCK_N, 64)>;
  // Tiles of 80 keys leave room for one stage of dO, and for one part of the dQ of one warpgroup.
  static constexpr DqPath DQ_PATH = HEAD_DIM_V < HEAD_DIM ? DqPath::STAGED
                                    : GROUPS == 3         ? DqPath::STAGED_BY_PART
                                    : BLOCK_N == 80       ? DqPath::STAGED_IN_P
                                                          : DqPath::REGISTERS;
  static constexpr bool STAGES_DQ = DQ_PATH != DqPath::REGISTERS;
  static constexpr bool DQ_IN_P = DQ_PATH == DqPath::STAGED_IN_P;
  static constexpr int DOUT_STAGES = DQ_IN_P ? 1 : STAGES;
  using Shared = BwdShared<BwdRoundTile<WALKS_UP>, BLOCK_M, STAGES, DOUT_STAGES>;

  // The number of octets of columns in a part of dQ. No part straddles two column blocks of K.
  static constexpr int dq_octets(Part part) {
    return !SHARED_SLICE ? SLICES * 4 : part == FIRST ? SLICES * 8 : 8 / GROUPS;
  }
  static __device__ int first_dq_octet(Part part, int group) {
    if (!SHARED_SLICE) return (group * 2 + part) * (SLICES * 4);
    return (part == SECOND) * (GROUPS * SLICES * 8) + group * dq_octets(part);
  }
  static constexpr int DQ_BYTES = BLOCK_M * dq_octets(FIRST) * 8 * sizeof(float);

  static constexpr int V_OFFSET = TileK::BYTES;
  static constexpr int Q_OFFSET = V_OFFSET + TileV::BYTES;
  static constexpr int DOUT_OFFSET = Q_OFFSET + STAGES * TileQ::BYTES;
  static constexpr int P_OFFSET = DOUT_OFFSET + DOUT_STAGES * TileDout::BYTES;
  static constexpr int DS_OFFSET = P_OFFSET + TileS::BYTES;
  static constexpr int DQ_OFFSET = DS_OFFSET + TileS::BYTES;
  static constexpr int DQ_BUFFERS = DQ_PATH == DqPath::STAGED ? 2 : 1;  // of a warpgroup
  static constexpr int DQ_BYTES_OF_GROUP =
      DQ_BUFFERS == 1 ? DQ_BYTES : BLOCK_M * 8 * (dq_octets(FIRST) + dq_octets(SECOND)) * 4;
  static constexpr int BYTES = DQ_OFFSET + (!STAGES_DQ ? 0
                                            : DQ_IN_P  ? DQ_BYTES
                                                       : GROUPS * DQ_BYTES_OF_GROUP);
  static_assert(!DQ_IN_P || DQ_BYTES <= TileS::BYTES, "a part of dQ fits in the place of P");
  static_assert(!SHARED_SLICE || (SLICES == 1 && HEAD_DIM / 64 % GROUPS == 1 &&
                                  BLOCK_N / 2 * 64 * sizeof(float) <= TileS::BYTES),
                "one slice is shared, and half of it fits in the place of P, and of dS");
  static_assert(BLOCK_M == 64, "one warpgroup has all queries of S");
  static_assert(KEYS * GROUPS == BLOCK_N && KEYS % 8 == 0 && SLICES * GROUPS * 64 == HEAD_DIM_V,
                "equal shares");
};

// Two mbarriers between the consumers and the lane that keeps the turns. With a semaphore the
// blocks add to each query tile in turns, so that the sum is deterministic.
struct Turns {
  uint64_t come;  // the consumers may add to this tile
  uint64_t over;  // the consumers have added to it

  __device__ void init(int consumers) {
    mbarrier_init(smem_address(&come), 1);
    mbarrier_init(smem_address(&over), consumers / 32);
  }
};

// One lane keeps the turns, so that no consumer waits for memory.
template <int BLOCK_M, int BLOCK_N, class Shared>
__device__ __forceinline__ void keep_turns(const FlashBwdParams& params, Shared& shared,
                                           Turns& turns) {
  Ring<BWD_TILE_RECORDS> record;
  Ring<1> step;
  int* flag = nullptr;  // of the turn that this block has not ended yet
#pragma unroll 1
  for (;; record.advance()) {
    const auto& tile = shared.wait_tile(record);
    if (tile.n_rows == 0) return;
    // The lane has begun this tile, so it no longer reads the record of the last one.
    mbarrier_arrive(smem_address(&shared.almost_loaded));
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
      for (int m = tile.first_m(); tile.is_m(m); m = tile.next_m(m), step.advance()) {
        const int m_begin = m * BLOCK_M;
        begin_turn<BLOCK_M>(flag, params, tile, accum_row(params, tile, head, m_begin), m_begin,
                            BLOCK_N);
        mbarrier_arrive(smem_address(&turns.come));
        mbarrier_wait(smem_address(&turns.over), step.parity);
      }
    }
    end_turn(flag);
  }
}

// The buffers of dQ between the consumers and the reducer. A warpgroup has one for each part of its
// columns, or one for both. P must wait for the reducer where the buffer of warpgroup 0 lies in its
// place.
template <class L>
struct StagedDq {
  static constexpr int THREADS = WARPGROUP + 32;  // a consumer warpgroup and the reducer
  static constexpr int BUFFERS = L::DQ_BUFFERS;

  __device__ static uint32_t address(uint32_t smem, int group, Part part) {
    if (L::DQ_IN_P) return smem + (group == 0 ? L::P_OFFSET : L::DQ_OFFSET);
    return smem + L::DQ_OFFSET + group * L::DQ_BYTES_OF_GROUP + part % BUFFERS * L::DQ_BYTES;
  }
  __device__ static NamedBarrier empty(int group, Part part) {
    return static_cast<NamedBarrier>(static_cast<int>(NamedBarrier::DQ_EMPTY) + group * BUFFERS +
                                     part % BUFFERS);
  }
  __device__ static NamedBarrier full(int group, Part part) {
    return static_cast<NamedBarrier>(static_cast<int>(NamedBarrier::DQ_FULL) + group * BUFFERS +
                                     part % BUFFERS);
  }

  // The reducer gives the only buffer of warpgroup GROUP and of those after it back, each when the
  // copy engine has read it.
  template <int GROUP = 0>
  __device__ static void free_buffers(Part part, uint64_t& p_free, bool elected) {
    if (elected) {
      bulk_wait_read<L::GROUPS - 1 - GROUP>();
      if (L::DQ_IN_P && GROUP == 0 && part == SECOND) mbarrier_arrive(smem_address(&p_free));
    }
    __syncwarp();
    named_barrier_arrive(empty(GROUP, part), THREADS);
    if constexpr (GROUP + 1 < L::GROUPS) free_buffers<GROUP + 1>(part, p_free, elected);
  }
};

// The reducer is a warp that has the copy engine add the staged parts of dQ to the accumulator.
// With a semaphore the blocks add in turns, so that the sum is deterministic.
template <class L>
__device__ __forceinline__ void reduce_staged_dq(const FlashBwdParams& params,
                                                 typename L::Shared& shared, uint64_t& p_free,
                                                 uint32_t smem) {
  using Staged = StagedDq<L>;
  const bool elected = elect_one();
  int* flag = nullptr;  // of the turn that this block has not ended yet
#pragma unroll
  for (int group = 0; group < L::GROUPS; ++group) {
    named_barrier_arrive(Staged::empty(group, FIRST), Staged::THREADS);
  }
  Ring<BWD_TILE_RECORDS> record;
#pragma unroll 1
  for (;; record.advance()) {
    const auto& tile = shared.wait_tile(record);
    if (tile.n_rows == 0) break;
    // The warp has begun this tile, so it no longer reads the record of the last one.
    if (elected) mbarrier_arrive(smem_address(&shared.almost_loaded));
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
      for (int m = tile.first_m(); tile.is_m(m); m = tile.next_m(m)) {
        const int m_begin = m * L::BLOCK_M;
        const int64_t row = accum_row(params, tile, head, m_begin);
        float* accum = params.dq_accum + row * L::HEAD_DIM;
        if (elected && params.dq_semaphore)
          begin_turn<L::BLOCK_M>(flag, params, tile, row, m_begin, L::BLOCK_N);
#pragma unroll 1
        for (int i = FIRST; i <= SECOND; ++i) {
          const Part part = static_cast<Part>(i);
#pragma unroll
          for (int group = 0; group < L::GROUPS; ++group) {
            named_barrier_sync(Staged::full(group, part), Staged::THREADS);
            if (!elected) continue;
            bulk_reduce_add(accum + L::BLOCK_M * 8 * L::first_dq_octet(part, group),
                            Staged::address(smem, group, part),
                            L::BLOCK_M * 8 * L::dq_octets(part) * sizeof(float));
            bulk_commit();
          }
          if constexpr (Staged::BUFFERS == 2) {
            // The other part has been read when this wait ends. At the start there was none.
            const Part other = part == FIRST ? SECOND : FIRST;
            if (elected) bulk_wait_read<L::GROUPS>();
            __syncwarp();
#pragma unroll
            for (int group = 0; group < L::GROUPS; ++group) {
              named_barrier_arrive(Staged::empty(group, other), Staged::THREADS);
            }
          } else {
            Staged::free_buffers(part, p_free, elected);
          }
        }
      }
    }
    if (elected) end_turn(flag);
  }
  if (elected) bulk_wait<0>();  // before the block gives its shared memory back
}
