// Barriers in shared memory for the asynchronous copies of sm_90.
// PTX ISA: "Parallel Synchronization and Communication Instructions: mbarrier".
//
// An mbarrier counts arrivals, and the bytes that copies were announced to bring. When both counts
// are complete, its phase ends and the next one begins. A wait names the parity of the phase whose
// end it waits for. The first phase has parity 0, so a wait for parity 1 returns at once on a fresh
// barrier.
#pragma once
#include "../common/types.cuh"

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the cluster. A __syncthreads() must
// follow before other threads use them.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once, and announces the bytes that copies have to bring before the phase is complete.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until loads of shared memory have returned; `words` is the OR of one loaded word of each.
// Without this, an mbarrier arrival or a TMA copy that follows the loads in program order may
// overtake them: it is issued while the loads still queue behind the tensor cores for shared
// memory, and the data that they should read is overwritten (seen on an H200, with ldmatrix beside
// wgmma). The nanosleep below does nothing, but its predicate depends on the words, so the warp
// issues nothing after it before the loads have returned.
__device__ __forceinline__ void wait_for_loads(uint32_t words) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.eq.u32 never, %0, 0x7fedcba9;\n"
      "@never nanosleep.u32 0;\n"
      "}" ::"r"(words)
      : "memory");
}

// Waits for the end of the phase with this parity.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
