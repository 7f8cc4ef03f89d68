// Barriers in shared memory for the asynchronous copies of sm_90.
// PTX ISA: "Parallel Synchronization and Communication Instructions: mbarrier".
//
// A barrier counts arrivals and announced bytes; when both are complete its phase flips. A wait
// names the parity of the phase it waits for, so a fresh barrier lets wait(1) pass.
#pragma once
#include "../common/types.cuh"

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; a __syncthreads() must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival, and the number of bytes that copies will bring before the phase is complete.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until loads have arrived; `words` is the OR of a word of each. An mbarrier arrival, or a
// copy of the copy engine, that follows loads of shared memory in program order may overtake them:
// it is issued while they still wait behind the tensor cores for shared memory, and what they
// should read is overwritten (seen on an H200, with ldmatrix beside wgmma). The instruction that
// never sleeps needs the words, and nothing is issued before it.
__device__ __forceinline__ void wait_for_loads(uint32_t words) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.eq.u32 never, %0, 0x7fedcba9;\n"
      "@never nanosleep.u32 0;\n"
      "}" ::"r"(words)
      : "memory");
}

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
