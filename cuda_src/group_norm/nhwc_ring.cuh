// GroupNorm in NHWC with one read: the blocks, one on each multiprocessor, all of them at once (a
// cooperative launch), form teams. A team takes one sample after the other; each of its blocks has
// the same share of the positions of all of them.
//
// A sample that would leave little room for the next one, or that does not fit, is cut into slices,
// which pass as if they were samples: all positions of the channels of some of the groups. A team
// takes the first slice of all its samples before the second.
//
// A block's positions pass through a ring of slots in shared memory, each of SLOT_PACKS packs of
// every thread, of all tensors that are read. The roles of the warps (nhwc_ring_warps.cuh), each of
// which goes through all samples:
//   load     one thread: bulk copies, or boxes by tensor maps, into slots as they become empty
//   collect  CONSUMERS threads: from each full slot, sums for each run of a thread, which are the
//            neighbouring columns of its pack that belong to one group
//   publish  PUBLISHERS threads: the partial statistics of each group in this block, from the runs
//   reduce   a warp: for some of the groups, gathers the partial statistics of all blocks and
//            publishes the statistics
//   gather   a warp: the statistics of all groups, into shared memory
//   apply    CONSUMERS threads: the result; a slot is empty then
// So while the blocks exchange statistics of one sample, the next ones are loaded and collected.
//
// Microseconds on an H200 (bfloat16, SiLU, 32 groups): several teams for one, 64x320x64x64 forward
// 109.7 for 152.5; slices for whole samples, 8x128x256x256 forward 88.7 for 98.8, 8x320x128x128
// backward 100.7 for 107.2.
//
// Blocks publish records in global memory, which carry a tag: the number of the sample in the team,
// counted on from launch to launch on a stream, whatever their shapes are. A reader loads a record
// until it has the tag.
//
// Why this ends: a ring holds a sample at least, so that loading and collecting it wait for nothing
// but the samples before it.
//
// Why nothing is overwritten too early: each of `flight` samples has buffers and records of its
// own. Those of a sample are used anew by the sample `flight` later (the other, below), which
// touches none of them before its block has collected it. The last slot of the other was full then;
// since slots < (flight + 1) * sample_slots, what it held before was of the sample or of a later
// one, and all warps had applied it. So this block had gathered the statistics of the sample, which
// means that all blocks had published their partial statistics of it, from the runs, and that these
// had been read. And the reducer of the other has heard of all blocks that they have collected it,
// so all of them had gathered the statistics of the sample.
#pragma once
#include "../common/ring.cuh"
#include "../ptx/relaxed.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "affine.cuh"

constexpr int CONSUMERS = 256;  // threads that collect; as many apply
constexpr int SLOT_PACKS = 2;   // packs of a thread in a slot
constexpr int PUBLISHERS = 128;
constexpr int EXCHANGERS = PUBLISHERS + 2 * 32;  // with the warps that reduce and gather
constexpr int RING_THREADS = 2 * CONSUMERS + PUBLISHERS + WARPGROUP;
constexpr int RING_REGISTERS = 80;   // of a thread, as the block begins
constexpr int OTHER_REGISTERS = 56;  // enough for those that neither collect nor apply
static_assert(RING_THREADS == 3 * CONSUMERS && RING_REGISTERS == 65536 / RING_THREADS / 8 * 8, "");
constexpr int MAX_SLOTS = 64;
constexpr int MAX_FLIGHT = 8;
constexpr int MAX_TEAMS = 8;
constexpr int MAX_RING_GROUPS = 64;
constexpr int RING_BYTES = 225 << 10;  // of dynamic shared memory

enum class RingBarrier { all_threads, exchangers, collectors };

struct RingStorage {
  uint64_t full[MAX_SLOTS];
  uint64_t empty[MAX_SLOTS];
  uint64_t inputs[MAX_FLIGHT];      // there are group_inputs()
  uint64_t collected[MAX_FLIGHT];   // there are runs()
  uint64_t statistics[MAX_FLIGHT];  // there are statistics()
  uint32_t first_tag;

  __device__ void init(const GroupRing& ring) {
    for (int i = 0; i < ring.slots; ++i) {
      mbarrier_init(smem_address(&full[i]), 1);
      mbarrier_init(smem_address(&empty[i]), CONSUMERS / 32);
    }
    for (int i = 0; i < ring.flight; ++i) {
      mbarrier_init(smem_address(&inputs[i]), 32);
      mbarrier_init(smem_address(&collected[i]), CONSUMERS);
      mbarrier_init(smem_address(&statistics[i]), 32);
    }
    mbarrier_init_fence();
  }
};

static_assert(sizeof(RingStorage) + RING_BYTES <= 227 << 10, "more than a block can have");

// The part of a thread that collects or applies.
struct RingThread {
  int index;
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
template <typename T_, int TENSORS_>
struct RingBlock {
  using T = T_;
  static constexpr int TENSORS = TENSORS_;
  static constexpr int VECTOR = 16 / int(sizeof(T));
  static constexpr int TURNS = SLOT_PACKS / TENSORS;  // positions of a thread in a slot
  using Values = Words<T, VECTOR>[TENSORS][TURNS];
  const GroupNormRingBase& params;
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

  __device__ RingBlock(const GroupNormRingParams& all, RingStorage& storage, unsigned char* smem)
      : params(all.base), maps(all.maps), storage(storage), smem(smem) {
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

  // ---- the samples of a team, or slices of samples; the first team has the most ----
  __device__ int samples_of(int team) const {
    const GroupRing& ring = params.ring;
    return (int(params.shape.batch) - team + ring.teams - 1) / ring.teams * ring.slices;
  }
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
  __device__ int64_t part(const GroupStrides& strides, RingSample at) const {
    return at.sample * strides.batch + int64_t(begin) * pitch + at.slice * channels;
  }
  __device__ const T* input(int tensor, RingSample at) const {
    return static_cast<const T*>(tensor ? params.dout : params.x) +
           part(tensor ? params.dout_strides : params.x_strides, at);
  }
  __device__ T* output(RingSample at) const {
    return static_cast<T*>(params.out) + part(params.out_strides, at);
  }

  // How many positions a row of threads has.
  __device__ int count(int row) const {
    const int whole = own / rows;
    return whole + (row < own - whole * rows);
  }

  __device__ RingThread thread(int index) const {
    const int row = index / row_packs, column = (index - row * row_packs) * VECTOR;
    const bool any = row < rows;
    return {index,          any ? index : 0,      column,
            column / width, any ? count(row) : 0, row * pitch + column};
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

  // Loads this thread's channels of an array of all channels; zeros if it has no positions.
  template <typename WEIGHT>
  __device__ Words<WEIGHT, VECTOR> of_channels(const void* data, RingSample at,
                                               const RingThread& thread) const {
    if (!thread.count) return {};
    const int channel = at.slice * channels + thread.column;
    return load_words<VECTOR>(static_cast<const WEIGHT*>(data) + channel);
  }

  // ---- shared memory: slots; for each sample in flight runs, statistics, inputs ----
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
  // [groups]: what apply needs.
  __device__ float4* statistics(int place) const {
    return reinterpret_cast<float4*>(runs(params.ring.flight)) + place * groups;
  }
  // [groups]: mean, 1 / deviation, where collecting needs them.
  __device__ float2* group_inputs(int place) const {
    return reinterpret_cast<float2*>(statistics(params.ring.flight)) + place * groups;
  }
  // [2, CONSUMERS]: where the threads that collect add up their shares of dweight and dbias.
  __device__ Sums* columns(int half) const {
    return reinterpret_cast<Sums*>(group_inputs(params.ring.flight)) + half * CONSUMERS;
  }

  // ---- records in global memory, of a group of the sample at `place` ----
  __device__ uint4* partial_records(int place, int group) const {
    return params.partials + record(place, group) * params.ring.blocks;
  }
  __device__ uint4* statistics_record(int place, int group) const {
    return params.statistics + record(place, group);
  }
  __device__ int64_t record(int place, int group) const {
    return int64_t(team * params.ring.flight + place) * groups + group;
  }

  // ---- slots ----
  // The turns of a thread in a slot once it is full; beyond its last one they are anything.
  __device__ __forceinline__ void read(Values& values, RingPlace slot,
                                       const RingThread& thread) const {
    mbarrier_wait(smem_address(&storage.full[slot.stage]), slot.parity);
#pragma unroll
    for (int i = 0; i < TENSORS * TURNS; ++i) {
      const int tensor = i / TURNS, turn = i % TURNS;
      // The reader may write dz where its dout was.
      if (tensor == 0 || thread.count)
        values[tensor][turn] =
            load_words<VECTOR>(reinterpret_cast<const T*>(pack(slot, tensor, thread.reader, turn)));
    }
  }

  // By a warp that has read a slot for the last time; `values` is what it has read.
  __device__ __forceinline__ void release(RingPlace slot, const Values& values) const {
    uint32_t loaded = 0;
#pragma unroll
    for (int i = 0; i < TENSORS * TURNS; ++i) loaded |= values[i / TURNS][i % TURNS].words[0];
    wait_for_loads(loaded);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&storage.empty[slot.stage]));
  }

  // Calls visit(turn) for the turns of a slot that a thread with `rest` positions left has.
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
};
