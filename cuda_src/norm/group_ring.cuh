// GroupNorm with channels last and one read: the blocks, one on each multiprocessor, all of them at
// once (a cooperative launch), form teams. A team takes one sample after the other; each of its
// blocks has the same share of the positions of all of them.
//
// A sample that would leave little room for the next one, or that no block could take, is parted
// into slices, which pass as if they were samples: of all positions the channels of some of the
// groups. A team takes the first slice of all its samples before the second.
//
// A block's positions pass through a ring of slots in shared memory, each of SLOT_PACKS packs of
// every thread, of all tensors that are read. What which warps do with a sample:
//   load     bulk copies, or boxes by tensor maps, into slots as they become empty
//   collect  CONSUMERS threads: of each slot once it is full, sums for each run of a thread, the
//            neighbouring columns of its pack that are of one group
//   tell     SENDERS threads: of each group, what this block's runs make, to whoever sums it up
//   sum up   a warp: of some of the groups, what all positions need to know, from all blocks
//   receive  a warp: what was found about all groups, into shared memory
//   apply    CONSUMERS threads: the result; a slot is empty then
// So while the blocks tell each other about one sample, the next ones are loaded and collected.
// Kernels differ in what they collect, how it adds up, and what they apply.
//
// Blocks talk through records in global memory, which carry a tag: the number of the sample in the
// team, counted on from launch to launch on a stream, whatever their shapes are. A reader loads a
// record until it has the tag.
//
// Why this ends: a ring holds a sample at least, so that loading and collecting it wait for nothing
// but the samples before it.
//
// Why nothing is overwritten too early: of `flight` samples each has buffers and records of its
// own. Those of a sample are used anew by the sample `flight` later (the other, below), which
// touches none of them before its block has collected it. The last slot of the other was full then;
// since slots < (flight + 1) * sample_slots, what it held before was of the sample or of a later
// one, and all warps had applied it. So this block had received all that was found about the
// sample, which means that all blocks had told what they had to, from the runs, and that it had
// been read. And whoever sums up the other has heard of all blocks that they have collected it, so
// all of them had received what was found about the sample.
#pragma once
#include "../common/ring.cuh"
#include "../ptx/relaxed.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "channel_tile.cuh"

constexpr int CONSUMERS = 256;  // threads that collect; as many apply
constexpr int SLOT_PACKS = 2;   // packs of a thread in a slot
constexpr int SENDERS = 128;
constexpr int TELLERS = SENDERS + 2 * 32;  // and who sums up, and who receives
constexpr int RING_THREADS = 2 * CONSUMERS + SENDERS + WARPGROUP;
constexpr int RING_REGISTERS = 80;   // of a thread, as the block begins
constexpr int OTHER_REGISTERS = 56;  // enough for those that neither collect nor apply
static_assert(RING_THREADS == 3 * CONSUMERS && RING_REGISTERS == 65536 / RING_THREADS / 8 * 8, "");
constexpr int MAX_SLOTS = 64;
constexpr int MAX_FLIGHT = 8;
constexpr int MAX_TEAMS = 8;
constexpr int MAX_RING_GROUPS = 64;
constexpr int RING_BYTES = 225 << 10;  // of dynamic shared memory
constexpr int TELLERS_BARRIER = 1;

struct RingStorage {
  uint64_t full[MAX_SLOTS];
  uint64_t empty[MAX_SLOTS];
  uint64_t given[MAX_FLIGHT];
  uint64_t collected[MAX_FLIGHT];
  uint64_t known[MAX_FLIGHT];
  uint32_t first_tag;

  __device__ void init(const GroupRing& ring) {
    for (int i = 0; i < ring.slots; ++i) {
      mbarrier_init(smem_address(&full[i]), 1);
      mbarrier_init(smem_address(&empty[i]), CONSUMERS / 32);
    }
    for (int i = 0; i < ring.flight; ++i) {
      mbarrier_init(smem_address(&given[i]), 32);
      mbarrier_init(smem_address(&collected[i]), CONSUMERS);
      mbarrier_init(smem_address(&known[i]), 32);
    }
    mbarrier_init_fence();
  }
};

static_assert(sizeof(RingStorage) + RING_BYTES <= 227 << 10, "more than a block can have");

// What a thread that collects or applies has.
struct RingThread {
  int reader;  // whose packs it reads: its own, or where it has none, those of thread 0
  int column;  // the first of its pack
  int group;   // of that column
  int count;   // positions
  int offset;  // of its first pack in memory, from the first one of the block
};

// Which sample, or which slice of it.
struct RingSample {
  int slice;
  int sample;
};

// Which part of which samples a block has, of TENSORS tensors. A row of threads has a position, a
// thread of it a pack.
template <class Params, typename T, int TENSOR_COUNT>
struct RingBlock {
  using Type = T;
  static constexpr int TENSORS = TENSOR_COUNT;
  static constexpr int VECTOR = 16 / int(sizeof(T));
  static constexpr int TURNS = SLOT_PACKS / TENSORS;  // positions of a thread in a slot
  using Values = Words<T, VECTOR>[TURNS];
  const Params& params;
  const TensorMap* maps;
  RingStorage& storage;
  unsigned char* smem;
  int team, share;       // this block is the share-th of its team
  int samples;           // of the team, or slices of them, one after the other
  int begin, own;        // positions of this block
  int width;             // channels of a group
  int groups, channels;  // of a slice
  int pitch;             // between two positions
  int row_packs, rows;
  int slot_positions, slot_bytes;  // the bytes of one tensor

  __device__ RingBlock(const Params& params, const TensorMap* maps, RingStorage& storage,
                       unsigned char* smem)
      : params(params), maps(maps), storage(storage), smem(smem) {
    const GroupNormShape& shape = params.shape;
    const GroupRing& ring = params.ring;
    team = blockIdx.x % ring.teams, share = blockIdx.x / ring.teams;
    samples = samples_of(team);
    begin = share * ring.span;
    own = min(ring.span, shape.positions - begin);
    width = shape.channels, groups = shape.groups / ring.slices;
    channels = groups * width, pitch = shape.groups * width;
    row_packs = channels / VECTOR, rows = CONSUMERS / row_packs;
    slot_positions = rows * TURNS;
    slot_bytes = slot_positions * channels * int(sizeof(T));
  }

  // The samples of a team, or slices of samples; the first team has the most.
  __device__ int samples_of(int team) const {
    const GroupRing& ring = params.ring;
    return (int(params.shape.batch) - team + ring.teams - 1) / ring.teams * ring.slices;
  }

  // The way of a team through them.
  __device__ RingSample start() const { return {0, team}; }
  __device__ bool has(RingSample at) const { return at.slice < params.ring.slices; }
  __device__ void advance(RingSample& at) const {
    at.sample += params.ring.teams;
    if (at.sample >= int(params.shape.batch)) at = {at.slice + 1, team};
  }

  // Its first group, counted on from sample to sample.
  __device__ int64_t first_group(RingSample at) const {
    return int64_t(at.sample) * params.shape.groups + at.slice * groups;
  }

  // Where this block's part of it begins.
  template <typename V>
  __device__ V* part(V* tensor, const GroupStrides& strides, RingSample at) const {
    return tensor + at.sample * strides.batch + int64_t(begin) * pitch + at.slice * channels;
  }

  // How many positions a row of threads has.
  __device__ int count(int row) const {
    const int whole = own / rows;
    return whole + (row < own - whole * rows);
  }

  __device__ RingThread thread(int index) const {
    const int row = index / row_packs, column = (index - row * row_packs) * VECTOR;
    const bool any = row < rows;
    return {any ? index : 0, column, column / width, any ? count(row) : 0, row * pitch + column};
  }

  // Calls visit(i, group) for each channel of a thread.
  template <class Visit>
  __device__ void each_channel(const RingThread& thread, Visit visit) const {
    int group = thread.group, left = thread.column - group * width;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      visit(i, group);
      if (++left == width) ++group, left = 0;
    }
  }

  // ---- shared memory: slots; of each sample in flight runs, what was found, what was given ----
  __device__ unsigned char* pack(RingPlace slot, int tensor, int thread, int turn) const {
    return smem + (slot.stage * TENSORS + tensor) * slot_bytes + thread * 16 +
           turn * (slot_bytes / TURNS);
  }
  // [runs, CONSUMERS]: two numbers of each run of a thread.
  __device__ float2* runs(int place) const {
    const int packs = params.ring.runs * CONSUMERS;
    return reinterpret_cast<float2*>(smem + params.ring.slots * TENSORS * slot_bytes) +
           place * packs;
  }
  // [groups]
  __device__ float4* known(int place) const {
    return reinterpret_cast<float4*>(runs(params.ring.flight)) + place * groups;
  }
  // [groups]: mean, 1 / deviation
  __device__ float2* given(int place) const {
    return reinterpret_cast<float2*>(known(params.ring.flight)) + place * groups;
  }

  // [2, CONSUMERS]: where those that collect add up their shares of dweight and dbias.
  __device__ Sums* columns(int half) const {
    return reinterpret_cast<Sums*>(given(params.ring.flight)) + half * CONSUMERS;
  }

  // ---- what the blocks have to say of a group of the sample at `place`, what is made of it ----
  __device__ uint4* told(int place, int group) const {
    return params.told + record(place, group) * params.ring.blocks;
  }
  __device__ uint4* found(int place, int group) const {
    return params.found + record(place, group);
  }
  __device__ int64_t record(int place, int group) const {
    return int64_t(team * params.ring.flight + place) * groups + group;
  }

  __device__ __forceinline__ void wait(RingPlace slot) const {
    mbarrier_wait(smem_address(&storage.full[slot.stage]), slot.parity);
  }

  // The turns of a thread in a slot that is full; beyond its last one they are anything.
  __device__ __forceinline__ void read(Values& values, RingPlace slot, int tensor,
                                       int thread) const {
#pragma unroll
    for (int i = 0; i < TURNS; ++i)
      values[i] = load_words<VECTOR>(reinterpret_cast<const T*>(pack(slot, tensor, thread, i)));
  }

  // The way back of one turn.
  __device__ __forceinline__ void write(RingPlace slot, int tensor, int thread, int turn,
                                        const float (&values)[VECTOR]) const {
    *reinterpret_cast<uint4*>(pack(slot, tensor, thread, turn)) = bits_of(round_words<T>(values));
  }

  // By a warp that has read a slot for the last time; `values` is what it has read.
  template <class... Read>
  __device__ __forceinline__ void release(RingPlace slot, const Read&... values) const {
    uint32_t loaded = 0;
#pragma unroll
    for (int i = 0; i < TURNS; ++i) loaded |= (values[i].words[0] | ...);
    wait_for_loads(loaded);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&storage.empty[slot.stage]));
  }

  // Calls visit(turn) for those turns of a slot of which the thread has so many left.
  template <class Visit>
  __device__ __forceinline__ static void each_turn(int rest, Visit visit) {
    if (rest >= TURNS) {
#pragma unroll
      for (int i = 0; i < TURNS; ++i) visit(i);
    } else {
#pragma unroll
      for (int i = 0; i < TURNS; ++i) {
        if (i < rest) visit(i);
      }
    }
  }

  // To the other warps, what those that collect have found: of each run the result of
  // sum_of(low, high), of the elements of the pack from low to high.
  template <class SumOf>
  __device__ __forceinline__ void hand_over(const RingThread& thread, int index, RingPlace place,
                                            SumOf sum_of) const {
    float2* result = runs(place.stage) + index;
    int low = thread.group * width - thread.column;
    for (int run = 0; run < params.ring.runs; ++run, low += width, result += CONSUMERS) {
      const int high = min(low + width, VECTOR);
      if (thread.count && high > max(low, 0)) *result = sum_of(max(low, 0), high);
    }
    mbarrier_arrive(smem_address(&storage.collected[place.stage]));
  }
};
