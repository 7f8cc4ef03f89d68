// How the blocks of a cluster exchange sums.
#pragma once
#include "../common/group_sum.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"

// One exchange of two numbers of each block. Each block writes its numbers into the shared memory
// of all blocks, so no barrier of the cluster is needed at the end: a block that has received all
// that is sent to it may end, as nobody will access its shared memory any more.
template <int CLUSTER>
struct ClusterExchange {
  Sums sent[CLUSTER];
  uint64_t full;

  // Called by all threads of the cluster, some time before swap().
  __device__ void init() {
    if (threadIdx.x == 0) {
      mbarrier_init(smem_address(&full), 1);
      mbarrier_init_fence();
    }
    cluster_arrive_relaxed();
  }

  // Sends `own`, which all threads of the block have; returns that of block threadIdx.x % CLUSTER.
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

// Repeated exchanges of two numbers of each warp of the cluster. Each warp writes to all blocks. A
// barrier of the cluster would cost more: its release waits until all writes of the block to global
// memory have been performed.
//
// Two places are enough: a warp sends round i + 1 after it has received round i, which the others
// sent after they had read round i - 1. A block that has received its last round may end, as
// everything that is sent to it has arrived.
template <int CLUSTER, int WARPS>
struct ClusterRounds {
  Sums sent[2][CLUSTER * WARPS];
  uint64_t full[2];

  // The number of this warp in the cluster.
  __device__ static int sender() { return cluster_rank() * WARPS + threadIdx.x / 32; }

  // Called by all threads of the cluster, some time before the first of them sends.
  __device__ void init() {
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : full) mbarrier_init(smem_address(&barrier), 1);
      mbarrier_init_fence();
    }
    cluster_arrive_relaxed();
  }

  // Sends `own`, which all lanes of the warp have. The first round waits until all blocks have
  // initialised their barriers.
  __device__ void send(int round, Sums own) {
    if (round == 0) cluster_wait();
    const int lane = threadIdx.x % 32;
    const uint32_t barrier = smem_address(&full[round % 2]);
    if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, sizeof(sent[0]));
    if (lane < CLUSTER)
      st_async_cluster(smem_address(&sent[round % 2][sender()]), barrier, lane, own.first,
                       own.second);
  }

  // Waits for a round and returns the numbers of all warps, in their order.
  __device__ const Sums* wait(int round) const {
    mbarrier_wait(smem_address(&full[round % 2]), round / 2 % 2);
    return sent[round % 2];
  }
};
