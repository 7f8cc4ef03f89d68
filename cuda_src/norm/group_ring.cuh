// What the warps of group_norm_fwd_ring_sm90 share: which part of which samples a block has, the
// ring of slots in shared memory, and the records by which blocks tell each other what they found.
#pragma once
#include "../common/ring.cuh"
#include "../ptx/relaxed.cuh"
#include "channel_tile.cuh"

constexpr int CONSUMERS = 256;  // threads that collect; as many apply
constexpr int TURNS = 2;        // positions of a thread in a slot
constexpr int SENDERS = 64;
constexpr int RING_THREADS = 2 * CONSUMERS + SENDERS + 3 * 32;
constexpr int MAX_SLOTS = 64;
constexpr int MAX_FLIGHT = 8;
constexpr int MAX_RING_GROUPS = 64;
constexpr int RING_BYTES = 221 << 10;  // of dynamic shared memory: slots and runs

// The threads behind the consumers, and what they synchronise with.
constexpr int TELLERS = SENDERS + 2 * 32;
constexpr int TELLERS_BARRIER = 1;

struct RingStorage {
  uint64_t full[MAX_SLOTS];
  uint64_t empty[MAX_SLOTS];
  uint64_t collected[MAX_FLIGHT];
  uint64_t known[MAX_FLIGHT];
  float2 stats[MAX_FLIGHT][MAX_RING_GROUPS];  // mean, 1 / deviation
  uint32_t first_tag;

  __device__ void init(const GroupNormRingParams& params) {
    for (int i = 0; i < params.slots; ++i) {
      mbarrier_init(smem_address(&full[i]), 1);
      mbarrier_init(smem_address(&empty[i]), CONSUMERS / 32);
    }
    for (int i = 0; i < params.flight; ++i) {
      mbarrier_init(smem_address(&collected[i]), CONSUMERS);
      mbarrier_init(smem_address(&known[i]), 32);
    }
    mbarrier_init_fence();
  }
};

static_assert(sizeof(RingStorage) + RING_BYTES <= 227 << 10, "more than a block can have");

// Which part of which samples a block has. A row of threads has a position, a thread of it a pack.
template <typename T, int VECTOR>
struct RingShare {
  int team, share;  // this block is the share-th of its team
  int samples;      // of the team, one after the other
  int begin, own;   // positions of this block
  int channels, row_packs, rows;
  int slot_positions, slot_bytes;

  __device__ explicit RingShare(const GroupNormRingParams& params) {
    const GroupNormShape& shape = params.shape;
    team = blockIdx.x % params.teams, share = blockIdx.x / params.teams;
    samples = (int(shape.batch) - team + params.teams - 1) / params.teams;
    begin = share * params.span;
    own = min(params.span, shape.positions - begin);
    channels = shape.groups * shape.channels;
    row_packs = channels / VECTOR, rows = CONSUMERS / row_packs;
    slot_positions = rows * TURNS;
    slot_bytes = slot_positions * channels * int(sizeof(T));
  }

  // The sample of a round.
  __device__ int64_t sample(const GroupNormRingParams& params, int round) const {
    return team + int64_t(round) * params.teams;
  }

  // How many positions a row of threads has.
  __device__ int count(int row) const {
    const int whole = own / rows;
    return whole + (row < own - whole * rows);
  }

  // Behind the slots: of each sample in flight and each run of a thread, mean and squares of the
  // deviations from it.
  __device__ float2* runs(const GroupNormRingParams& params, unsigned char* smem, int place) const {
    return reinterpret_cast<float2*>(smem + params.slots * slot_bytes) +
           place * params.runs * CONSUMERS;
  }

  // What the blocks have to say of a group of the sample at `place`, and what is made of it.
  __device__ uint4* moments(const GroupNormRingParams& params, int place, int group) const {
    const int64_t index = int64_t(team * params.flight + place) * params.shape.groups + group;
    return params.moments + index * params.blocks;
  }
  __device__ uint4* found(const GroupNormRingParams& params, int place, int group) const {
    return params.found + int64_t(team * params.flight + place) * params.shape.groups + group;
  }
};

__device__ __forceinline__ void send(uint4* record, float a, float b, float c, uint32_t tag) {
  st_relaxed_b128(record,
                  make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), tag));
}

__device__ __forceinline__ uint4 receive(const uint4* record, uint32_t tag) {
  uint4 v;
  do {
    v = ld_relaxed_b128(record);
  } while (v.w != tag);
  return v;
}
