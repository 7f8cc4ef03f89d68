// The tiles of a block of flash_bwd_sm90.cu in shared memory, and the named barriers between its
// warps.
#pragma once
#include "../../common/smem_tile.cuh"
#include "../text/tile_parts.cuh"
#include "bwd_heads.cuh"

// The consumers meet at DS_WRITTEN when all have written their part of dS. DQ_EMPTY and DQ_FULL say
// that the buffer of a warpgroup's part of dQ may be written by the warpgroup, or added to global
// memory by the reducer. Each warpgroup has barriers of its own, so that none waits for the part of
// another.
enum class NamedBarrier {
  DS_WRITTEN = 1,
  DQ_EMPTY_OF_GROUP_0,
  DQ_EMPTY_OF_GROUP_1,
  DQ_FULL_OF_GROUP_0,
  DQ_FULL_OF_GROUP_1
};

__device__ __forceinline__ NamedBarrier dq_empty(int group) {
  return static_cast<NamedBarrier>(static_cast<int>(NamedBarrier::DQ_EMPTY_OF_GROUP_0) + group);
}
__device__ __forceinline__ NamedBarrier dq_full(int group) {
  return static_cast<NamedBarrier>(static_cast<int>(NamedBarrier::DQ_FULL_OF_GROUP_0) + group);
}
constexpr int DQ_THREADS = WARPGROUP + 32;  // a consumer warpgroup and the reducer

// The tiles of a block and their places in dynamic shared memory.
template <class Options, int HEAD_DIM_, int BLOCK_M_, int BLOCK_N_, int STAGES_, bool WALKS_UP_,
          bool WHOLE_HEADS_>
struct BwdLayout {
  static constexpr bool WALKS_UP = WALKS_UP_;
  static constexpr bool WHOLE_HEADS = WHOLE_HEADS_;
  using BlockTile = typename Choose<WHOLE_HEADS, BwdHeadTile, BwdWalkingTile<WALKS_UP>>::Type;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int BLOCK_N = BLOCK_N_;
  static constexpr int STAGES = STAGES_;
  static constexpr int GROUPS = BLOCK_N / 64;  // consumer warpgroups
  static constexpr int CONSUMERS = GROUPS * WARPGROUP;
  // Whether scores read parts of a text from shared memory (text/parts.cuh).
  static constexpr bool HAS_PARTS = HAS_USER_PARTS && !HAS_MASK_TILES;
  // Whether all scores of a tile that is far from the diagonal have the same shift.
  static constexpr bool HAS_FAR = HAS_PARTS && TEXT_HAS_FAR<Options>;
  using Shared = typename text::PartsOfWarps<HAS_PARTS, BLOCK_M / 8, CONSUMERS / 32,
                                             BwdShared<BlockTile, BLOCK_M, STAGES>>::Type;
  using TileKV = SmemTile<BLOCK_N, tile_columns(HEAD_DIM)>;
  using TileQ = SmemTile<BLOCK_M, tile_columns(HEAD_DIM)>;
  using TileS = SmemTile<BLOCK_M, BLOCK_N>;
  using TileBias = SmemTile<BLOCK_M, 64>;
  static constexpr bool HAS_BIAS_TILES = is_by_tma(Options::BIAS);
  // Each warpgroup computes a part of dQ: 64 of its rows, or 64 of its columns, or its share of 64
  // or fewer.
  static constexpr bool SPLIT_ROWS = BLOCK_M == 64 * GROUPS;
  static constexpr int DQ_COLS = HEAD_DIM > 64 ? 64 : SPLIT_ROWS ? HEAD_DIM : HEAD_DIM / GROUPS;
  static constexpr int DQ_PART = 64 * DQ_COLS;  // floats
  static constexpr int DQ_BYTES = GROUPS * DQ_PART * sizeof(float);
  static_assert(SPLIT_ROWS ? HEAD_DIM <= 64 : BLOCK_M == 64 && HEAD_DIM <= GROUPS * 64,
                "dQ has one part a warpgroup");

  // Whether lse_log2 and delta are read before S is issued. Afterwards the products of both
  // warpgroups keep shared memory so busy that a load takes hundreds of clocks. The values read
  // ahead need registers, which the options of a score, or more rows, do not leave.
  static constexpr bool CONSTANTS_AHEAD = BLOCK_M == 64 && Options::NONE;
  // Whether S of a query tile is issued while dK of the previous one is computed. Only plain scores
  // at head dims up to 64 leave enough registers.
  static constexpr bool OVERLAPPED = HEAD_DIM <= 64 && Options::NONE;
  static_assert(!(OVERLAPPED && CONSTANTS_AHEAD), "overlapped steps do not read constants ahead");

  static constexpr int V_OFFSET = TileKV::BYTES;
  static constexpr int Q_OFFSET = V_OFFSET + TileKV::BYTES;
  static constexpr int DOUT_OFFSET = Q_OFFSET + STAGES * TileQ::BYTES;
  static constexpr int DS_OFFSET = DOUT_OFFSET + STAGES * TileQ::BYTES;
  static constexpr int DQ_OFFSET = DS_OFFSET + STAGES * TileS::BYTES;
  static constexpr int BIAS_OFFSET = DQ_OFFSET + DQ_BYTES;
  static constexpr int BYTES = BIAS_OFFSET + (HAS_BIAS_TILES ? GROUPS * TileBias::BYTES : 0);

  __device__ static uint32_t bias_address(uint32_t smem, int group) {
    return smem + BIAS_OFFSET + group * TileBias::BYTES;
  }
};

// lse_log2 or delta of the queries of a lane, if they are read ahead. Queries are columns.
template <class L>
using ConstantsAhead = float2[L::CONSTANTS_AHEAD ? L::BLOCK_M / 8 : 1];

__device__ __forceinline__ float2 constant_pair(const float* constants, int n, int column) {
  return *reinterpret_cast<const float2*>(constants + n * 8 + column);
}

template <class L>
__device__ __forceinline__ void load_constants(ConstantsAhead<L>& ahead, const float* constants) {
#pragma unroll
  for (int n = 0; n < L::BLOCK_M / 8; ++n)
    ahead[n] = constant_pair(constants, n, threadIdx.x % 4 * 2);
}

// Returns that of the query of element [n][i].
template <class L>
__device__ __forceinline__ float constant_of(const ConstantsAhead<L>& ahead, const float* constants,
                                             int n, int i, int column) {
  const float2 pair =
      L::CONSTANTS_AHEAD ? ahead[L::CONSTANTS_AHEAD ? n : 0] : constant_pair(constants, n, column);
  return i % 2 ? pair.y : pair.x;
}
