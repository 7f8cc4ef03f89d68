// The sums that the backward takes over a row, and how the warps and blocks of the row share them.
#pragma once
#include "../ptx/warpgroup.cuh"
#include "cluster_exchange.cuh"

// The statistics of a row, which the forward wrote.
struct RowStats {
  float mean;
  float scale;
};

// The sums over THREADS consecutive lanes (a power of two), or over the warp if those are more.
// RMSNorm uses the second sum only.
template <bool RMS, int THREADS>
__device__ __forceinline__ Sums lane_sum(Sums sums) {
#pragma unroll
  for (int mask = 1; mask < min(THREADS, 32); mask *= 2) {
    sums.second += shuffle_xor(sums.second, mask);
    if (!RMS) sums.first += shuffle_xor(sums.first, mask);
  }
  return sums;
}

// Adds up the sums of the warps of a row; every thread gets the same bits. `scratch` has a place
// for each warp of the block. The caller alternates between two of them: a warp that writes into
// the first again has passed the barrier of the second, behind which no warp reads the first any
// more.
template <class Tile, bool RMS>
__device__ __forceinline__ Sums row_sum(Sums sums, Sums* scratch) {
  constexpr int WARPS = Tile::ROW_THREADS / 32;
  if constexpr (WARPS > 1) {
    static_assert(Tile::ROWS < 16, "a named barrier for each row");
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = sums;
    named_barrier_sync(1 + Tile::row(), Tile::ROW_THREADS);
    sums = lane_sum<RMS, WARPS>(scratch[Tile::row() * WARPS + threadIdx.x % WARPS]);
  }
  return sums;
}

// The same over the warps of all blocks of a cluster: each warp sends its sums of a row to all
// blocks (ClusterRounds), and receives those of all warps.
template <bool RMS, int CLUSTER, int WARPS>
struct ClusterSums : ClusterRounds<CLUSTER, WARPS> {
  static constexpr int SENDERS = CLUSTER * WARPS;
  static_assert(SENDERS % 32 == 0, "as many for each lane");

  // Every thread gets the same bits.
  __device__ Sums receive(int row) const {
    const Sums* from = this->wait(row) + threadIdx.x % 32;
    Sums sums = from[0];
#pragma unroll
    for (int i = 32; i < SENDERS; i += 32) sums = sums + from[i];
    return lane_sum<RMS, 32>(sums);
  }
};
