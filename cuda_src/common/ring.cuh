// A place in a ring of buffers in shared memory, with the parity that its barriers have this time
// round. Producer and consumers walk over the same ring, each with a place of its own: the producer
// waits for `empty` with the opposite parity, which a fresh barrier lets pass.
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

// The same if the number of stages is known at compile time.
template <int STAGES>
struct Ring : RingPlace {
  __device__ void advance() { next(STAGES); }
  __device__ void advance(uint32_t places) {
    places += stage;
    parity ^= places / STAGES & 1;
    stage = places % STAGES;
  }
};

// The barriers of a ring: `full` counts the producer's announcement and the bytes of its copies,
// `empty` the arrivals of the consumers.
template <int STAGES>
struct RingBarriers {
  uint64_t full[STAGES];
  uint64_t empty[STAGES];

  __device__ void init(int consumers) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem_address(&full[i]), 1);
      mbarrier_init(smem_address(&empty[i]), consumers);
    }
  }
  __device__ void wait_full(const Ring<STAGES>& at) {
    mbarrier_wait(smem_address(&full[at.stage]), at.parity);
  }
  __device__ void wait_empty(const Ring<STAGES>& at) {
    mbarrier_wait(smem_address(&empty[at.stage]), at.parity ^ 1);
  }
  // Consumers that read with wgmma: a warp each, after its wgmma_wait(); with other loads, after
  // wait_for_loads() and __syncwarp().
  __device__ void release(int stage) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&empty[stage]));
  }
  // Consumers that read with ordinary loads as well: a thread each.
  __device__ void release_by_thread(int stage) { mbarrier_arrive(smem_address(&empty[stage])); }
};
