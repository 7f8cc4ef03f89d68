// A ring of buffers ("stages") in shared memory, through which a producer hands tiles to consumers,
// and its barriers. Each role walks over the ring with a place of its own: the current stage, and
// the parity that the barriers of this stage have in the current round. A consumer waits for `full`
// with this parity. The producer waits for `empty` with the opposite one, for which a wait on a
// fresh barrier returns at once: in the first round all stages are empty.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"

struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A place in a ring whose number of stages is fixed when the kernel is compiled.
template <int STAGES>
struct Ring : RingPlace {
  __device__ void advance() { next(STAGES); }
  __device__ void advance(uint32_t places) {
    places += stage;
    parity ^= places / STAGES & 1;
    stage = places % STAGES;
  }
};

// The place after `count` advances from the first. A counter takes one register instead of two.
template <int STAGES>
__device__ __forceinline__ Ring<STAGES> ring_place(uint32_t count) {
  static_assert((STAGES & (STAGES - 1)) == 0, "the counter may wrap around");
  return {int(count % STAGES), count / STAGES % 2};
}

// The barriers of a ring. `full` counts one arrival of each producer and the bytes of its copies,
// `empty` the arrivals of the consumers, which come after their last read of the stage.
template <int STAGES>
struct RingBarriers {
  uint64_t full[STAGES];
  uint64_t empty[STAGES];

  __device__ void init(int consumers, int producers = 1) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem_address(&full[i]), producers);
      mbarrier_init(smem_address(&empty[i]), consumers);
    }
  }
  __device__ void wait_full(const Ring<STAGES>& at) {
    mbarrier_wait(smem_address(&full[at.stage]), at.parity);
  }
  __device__ void wait_empty(const Ring<STAGES>& at) {
    mbarrier_wait(smem_address(&empty[at.stage]), at.parity ^ 1);
  }
  // One arrival a warp. The warp calls it after the wgmma_wait() that covers its reads; if it reads
  // with other loads, wait_for_loads() and __syncwarp() come first.
  __device__ void release(int stage) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&empty[stage]));
  }
  // One arrival a thread, for consumers that read with ordinary loads as well.
  __device__ void release_by_thread(int stage) { mbarrier_arrive(smem_address(&empty[stage])); }
};
