// Clusters of sm_90: blocks that run at the same time and can access each other's shared memory.
// PTX ISA: "barrier.cluster", "mapa", "mbarrier.arrive", "st.async".
#pragma once
#include "../common/types.cuh"

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The barrier of a cluster, for whole warps. The wait ends when all threads of the cluster that
// have not exited have arrived; cluster_sync() also makes their writes visible to each other.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  cluster_wait();
}

// Arrives at the barrier of the cluster; a cluster_wait() must follow later. The arrival is
// relaxed: it neither waits for this thread's memory accesses nor publishes them. Only mbarriers
// that mbarrier_init_fence() has published may be used by other blocks after the wait.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Arrives at the mbarrier that lies at this shared address in block `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Stores two floats at the shared address `to` of block `rank` of the cluster, without waiting. The
// mbarrier at the shared address `barrier` of the same block counts their 8 bytes when they have
// arrived.
__device__ __forceinline__ void st_async_cluster(uint32_t to, uint32_t barrier, uint32_t rank,
                                                 float first, float second) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], {%3, %4}, "
      "[remote_barrier];\n"
      "}" ::"r"(to),
      "r"(barrier), "r"(rank), "f"(first), "f"(second)
      : "memory");
}
