// The sums that norm_bwd takes over a row, and where they come together.
#pragma once
#include "../common/group_sum.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/warpgroup.cuh"

// Of a row of norm_fwd.
struct RowStats {
  float mean;
  float scale;
};

// Over THREADS consecutive lanes (a power of two), or over the warp if they are more. RMSNorm uses
// the second sum only.
template <bool RMS, int THREADS>
__device__ __forceinline__ Sums lane_sum(Sums sums) {
#pragma unroll
  for (int mask = 1; mask < min(THREADS, 32); mask *= 2) {
    sums.second += shuffle_xor(sums.second, mask);
    if (!RMS) sums.first += shuffle_xor(sums.first, mask);
  }
  return sums;
}

// Over the warps of a row, of what their lanes have together; every thread gets the same bits.
// `scratch` has a place for each warp of the block, and is another one for the next row, so that no
// warp overwrites what another still reads.
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

// The same over the warps of all blocks of a cluster, one row after the other. Each warp writes to
// all blocks, and nobody waits at a barrier of the cluster: its release would first wait until the
// row's dx has been written to global memory.
//
// Two places are enough: a warp sends row i + 1 after it has received row i, which the others sent
// after they had read row i - 1. And as it has received all that was sent to its block, the block
// may end.
template <bool RMS, int CLUSTER, int WARPS>
struct ClusterSums {
  static constexpr int SENDERS = CLUSTER * WARPS;
  static_assert(SENDERS % 32 == 0, "as many for each lane");

  Sums sent[2][SENDERS];
  uint64_t full[2];

  // All threads of the cluster.
  __device__ void init() {
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : full) mbarrier_init(smem_address(&barrier), 1);
      mbarrier_init_fence();
    }
    cluster_sync();
  }

  __device__ void send(int row, Sums sums) {
    const int lane = threadIdx.x % 32, sender = cluster_rank() * WARPS + threadIdx.x / 32;
    const uint32_t barrier = smem_address(&full[row % 2]);
    if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, sizeof(sent[0]));
    if (lane < CLUSTER)
      st_async_cluster(smem_address(&sent[row % 2][sender]), barrier, lane, sums.first,
                       sums.second);
  }

  // Every thread gets the same bits.
  __device__ Sums receive(int row) const {
    mbarrier_wait(smem_address(&full[row % 2]), row / 2 % 2);
    const Sums* from = sent[row % 2] + threadIdx.x % 32;
    Sums sums = from[0];
#pragma unroll
    for (int i = 32; i < SENDERS; i += 32) sums = sums + from[i];
    return lane_sum<RMS, 32>(sums);
  }
};
