// Sums over the blocks of a cluster.
#pragma once
#include "../common/group_sum.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"

// Two numbers that all threads of a block have, once, and nobody waits at a barrier of the cluster
// at the end: each block writes to all others. One that has received all that was sent to it may
// end.
template <int CLUSTER>
struct ClusterExchange {
  Sums sent[CLUSTER];
  uint64_t full;

  // All threads of the cluster, some time before swap().
  __device__ void init() {
    if (threadIdx.x == 0) {
      mbarrier_init(smem_address(&full), 1);
      mbarrier_init_fence();
    }
    cluster_arrive_relaxed();
  }

  // Gives `own`, which all threads of a block have; what block threadIdx.x % CLUSTER has.
  __device__ Sums swap(Sums own) {
    cluster_wait();
    if (threadIdx.x == 0) mbarrier_arrive_expect(smem_address(&full), sizeof(sent));
    if (threadIdx.x < CLUSTER)
      st_async_cluster(smem_address(&sent[cluster_rank()]), smem_address(&full), threadIdx.x,
                       own.first, own.second);
    mbarrier_wait(smem_address(&full), 0);
    return sent[threadIdx.x % CLUSTER];
  }
};

// Two numbers of each warp of the cluster, one round after the other. Each warp writes to all
// blocks, and nobody waits at a barrier of the cluster: its release would first wait until what
// the block wrote has reached global memory.
//
// Two places are enough: a warp sends round i + 1 after it has received round i, which the others
// sent after they had read round i - 1. And as it has received all that was sent to its block, the
// block may end.
template <int CLUSTER, int WARPS>
struct ClusterRounds {
  Sums sent[2][CLUSTER * WARPS];
  uint64_t full[2];

  // The number of this warp in the cluster.
  __device__ static int sender() { return cluster_rank() * WARPS + threadIdx.x / 32; }

  // All threads of the cluster, some time before the first of them sends.
  __device__ void init() {
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : full) mbarrier_init(smem_address(&barrier), 1);
      mbarrier_init_fence();
    }
    cluster_arrive_relaxed();
  }

  // What all lanes of a warp have. The first round waits for the barriers of all blocks.
  __device__ void send(int round, Sums own) {
    if (round == 0) cluster_wait();
    const int lane = threadIdx.x % 32;
    const uint32_t barrier = smem_address(&full[round % 2]);
    if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, sizeof(sent[0]));
    if (lane < CLUSTER)
      st_async_cluster(smem_address(&sent[round % 2][sender()]), barrier, lane, own.first,
                       own.second);
  }

  // Gives what the warps have sent, in their order.
  __device__ const Sums* wait(int round) const {
    mbarrier_wait(smem_address(&full[round % 2]), round / 2 % 2);
    return sent[round % 2];
  }
};
