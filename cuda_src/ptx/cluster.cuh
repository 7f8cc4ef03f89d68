// Clusters of sm_90: blocks that run at the same time and reach each other's shared memory.
// PTX ISA: "barrier.cluster", "mapa", "mbarrier.arrive", "st.async".
#pragma once
#include "../common/types.cuh"

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Whole warps; the wait is for all threads of the cluster that have not ended.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  cluster_wait();
}

// The arrival alone, for a cluster_wait() later on. Hands over nothing but barriers that a fence
// (mbarrier_init_fence) has made visible; waits for no memory access.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Where block `rank` of the cluster has what is at this place of shared memory.
template <typename T>
__device__ __forceinline__ T* cluster_shared(T* pointer, uint32_t rank) {
  uint64_t remote;
  asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(pointer), "r"(rank));
  return reinterpret_cast<T*>(remote);
}

// An arrival at the barrier that block `rank` of the cluster has at this shared address.
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

// Two floats to this shared address of block `rank` of the cluster. The barrier at this shared
// address of the same block counts their 8 bytes when they are there.
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
