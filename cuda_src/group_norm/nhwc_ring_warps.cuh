// The warps of a ring (nhwc_ring.cuh). Kernels differ in what they collect, how partial statistics
// add up, and how they apply the statistics. A Kernel has
//   block                    its RingBlock
//   COLLECT_REGISTERS, APPLY_REGISTERS  of a thread
//   Collector(kernel, thread)           begin(at, place); start(first pack); for each position
//                                       add(values, turn, slot); end(place); run(low, high), the
//                                       sums of a run, which are elements low to high of a pack;
//                                       end_slice(slice)
//   merge(each_run, lanes)   the Partial statistics of the runs of a group, which each_run(add)
//                            hands to add(count, run) in so many neighbouring threads; + adds them
//   prefetch(group)          inputs of statistics(), loaded before the wait for other blocks; the
//                            groups are counted on from sample to sample
//   statistics(partial, inputs, lane)   of a group
//   Factors(kernel, at, thread)         set(i, statistics) for each channel; result(values, turn)
//   InputLoader(block, lane)            for the warp that gathers: load(place) brings the
//                                       group_inputs() of the next sample. (Threads that collect
//                                       and read them from global memory are 5 to 10 % slower.)
#pragma once
#include "nhwc_ring.cuh"

constexpr int RECORDS = 3;  // that a lane asks for at once: a step takes the way to the L2 and back

// A record has up to three numbers.
template <class V>
__device__ __forceinline__ void publish(uint4* record, const V& v, uint32_t tag) {
  constexpr int FLOATS = sizeof(V) / sizeof(float);
  uint32_t words[3] = {};
#pragma unroll
  for (int i = 0; i < FLOATS; ++i)
    words[i] = __float_as_uint(reinterpret_cast<const float*>(&v)[i]);
  st_relaxed_b128(record, make_uint4(words[0], words[1], words[2], tag));
}

template <class V>
__device__ __forceinline__ V from_record(uint4 v) {
  const float x = __uint_as_float(v.x), y = __uint_as_float(v.y), z = __uint_as_float(v.z);
  if constexpr (sizeof(V) == 2 * sizeof(float)) {
    return {x, y};
  } else {
    return {x, y, z};
  }
}

// The positions of a whole sample in a slot are a run of bytes. Those of a slice are a box, all of
// which is loaded, even positions of the next block.
template <class Kernel>
__device__ __forceinline__ void ring_load(const Kernel& kernel) {
  using T = typename Kernel::Block::T;
  constexpr int TENSORS = Kernel::Block::TENSORS;
  const auto& block = kernel.block;
  const GroupRing& ring = block.params.ring;
  RingPlace slot;
  for (RingSample at = block.start(); block.has(at); block.advance(at)) {
    const T* data[TENSORS];
#pragma unroll
    for (int tensor = 0; tensor < TENSORS; ++tensor) data[tensor] = block.input(tensor, at);
    for (int i = 0; i < ring.sample_slots; ++i) {
      const int first = i * block.slot_positions, rest = block.own - first;
      const int run = min(block.slot_positions, rest) * block.channels * int(sizeof(T));
      const int bytes = rest <= 0 ? 0 : ring.slices > 1 ? block.slot_bytes : run;
      const uint32_t full = smem_address(&block.storage.full[slot.stage]);
      mbarrier_wait(smem_address(&block.storage.empty[slot.stage]), slot.parity ^ 1);
      mbarrier_arrive_expect(full, TENSORS * bytes);
#pragma unroll
      for (int tensor = 0; tensor < TENSORS; ++tensor) {
        const uint32_t to = smem_address(block.pack(slot, tensor, 0, 0));
        if (bytes && ring.slices > 1) {
          tma_load(to, block.maps[tensor], full, at.slice * block.channels, block.begin + first, 0,
                   at.sample);
        } else if (bytes) {
          bulk_load(to, data[tensor] + first * block.channels, bytes, full);
        }
      }
      slot.next(ring.slots);
    }
  }
}

template <class Kernel>
__device__ __forceinline__ void ring_collect(const Kernel& kernel, int index) {
  using Block = typename Kernel::Block;
  const Block& block = kernel.block;
  const GroupRing& ring = block.params.ring;
  const RingThread thread = block.thread(index);
  typename Kernel::Collector collector(kernel, thread);
  RingPlace slot, place;
  for (RingSample at = block.start(); block.has(at);) {
    collector.begin(at, place);
    int rest = thread.count;
#pragma unroll 1
    for (int i = 0; i < ring.sample_slots; ++i) {
      typename Block::Values values = {};
      block.read(values, slot, thread);
      if (i == 0) collector.start(values[0][0]);
      block.each_turn(rest, [&](int turn) { collector.add(values, turn, slot); });
      rest -= Block::TURNS;
      slot.next(ring.slots);
    }
    collector.end(place);
    float2* result = block.runs(place.stage) + index;
    int low = thread.group * block.width - thread.column;
    for (int run = 0; run < ring.runs; ++run, low += block.width, result += CONSUMERS) {
      const int first = max(low, 0), last = min(low + block.width, Block::VECTOR);
      if (thread.count && last > first) *result = collector.run(first, last);
    }
    mbarrier_arrive(smem_address(&block.storage.collected[place.stage]));
    place.next(ring.flight);
    const int slice = at.slice;
    block.advance(at);
    if (at.slice > slice) collector.end_slice(slice);
  }
}

template <class Kernel>
__device__ __forceinline__ void ring_publish(const Kernel& kernel, uint32_t tag, int thread) {
  constexpr int VECTOR = Kernel::Block::VECTOR;
  const auto& block = kernel.block;
  const int groups = block.groups, width = block.width;
  const int rows = min(block.rows, block.own);  // that have positions
  int lanes = 32;                               // of a group
  while (lanes > 1 && lanes * groups > PUBLISHERS) lanes /= 2;
  // A warp without a group would wait by parity, and nobody for it: it could fall behind for good.
  if (thread / 32 * 32 / lanes >= groups) return;
  const int lane = thread % lanes;
  RingPlace place;
  for (int round = 0; round < block.samples; ++round, ++tag) {
    const float2* const runs = block.runs(place.stage);
    mbarrier_wait(smem_address(&block.storage.collected[place.stage]), place.parity);
    for (int base = 0; base < groups; base += PUBLISHERS / lanes) {
      const int group = base + thread / lanes;
      const int begin = group * width, end = begin + width;
      const auto each_run = [&](auto add) {
        if (group >= groups) return;
        for (int pack = begin / VECTOR; pack * VECTOR < end; ++pack) {
          const int first = pack * VECTOR;
          const int length = min(end, first + VECTOR) - max(begin, first);
          const float2* of_pack = runs + (group - first / width) * CONSUMERS + pack;
          for (int row = lane; row < rows; row += lanes) {
            const float2 run = of_pack[row * block.row_packs];
            add(float(length * block.count(row)), Sums{run.x, run.y});
          }
        }
      };
      const auto partial = kernel.merge(each_run, lanes);
      if (lane == 0 && group < groups)
        publish(block.partial_records(place.stage, group) + block.share, partial, tag);
    }
    __syncwarp();
    place.next(block.params.ring.flight);
  }
}

template <class Kernel>
__device__ __forceinline__ void ring_reduce(const Kernel& kernel, uint32_t tag, int lane) {
  using Partial = typename Kernel::Partial;
  const auto& block = kernel.block;
  const GroupRing& ring = block.params.ring;
  RingPlace place;
  for (RingSample at = block.start(); block.has(at); block.advance(at), ++tag) {
    for (int group = block.share; group < block.groups; group += ring.blocks) {
      const auto inputs = kernel.prefetch(block.first_group(at) + group);
      const uint4* records = block.partial_records(place.stage, group);
      Partial sum = {};
      for (int first = lane; first < ring.blocks; first += 32 * RECORDS) {
        uint4 v[RECORDS];
        bool all;
        do {
          all = true;
#pragma unroll
          for (int i = 0; i < RECORDS; ++i)
            v[i] = ld_relaxed_b128(records + min(first + 32 * i, ring.blocks - 1));
#pragma unroll
          for (int i = 0; i < RECORDS; ++i) all = all && v[i].w == tag;
        } while (!all);
#pragma unroll
        for (int i = 0; i < RECORDS; ++i)
          if (first + 32 * i < ring.blocks) sum = sum + from_record<Partial>(v[i]);
      }
      __syncwarp();
      const auto statistics = kernel.statistics(sum_of_neighbours<32>(sum), inputs, lane);
      if (lane == 0) publish(block.statistics_record(place.stage, group), statistics, tag);
    }
    place.next(ring.flight);
  }
}

template <class Kernel>
__device__ __forceinline__ void ring_gather(const Kernel& kernel, uint32_t tag, int lane) {
  const auto& block = kernel.block;
  const GroupRing& ring = block.params.ring;
  typename Kernel::InputLoader inputs(block, lane);
  for (int i = 0; i < ring.flight; ++i) inputs.load(i);
  RingPlace place;
  for (int round = 0; round < block.samples; ++round, ++tag) {
    mbarrier_wait(smem_address(&block.storage.collected[place.stage]), place.parity);
    inputs.load(place.stage);  // the place of the one just collected
    for (int group = lane; group < block.groups; group += 32) {
      uint4 v;
      do {
        v = ld_relaxed_b128(block.statistics_record(place.stage, group));
      } while (v.w != tag);
      block.statistics(place.stage)[group] = from_record<float4>(v);
    }
    mbarrier_arrive(smem_address(&block.storage.statistics[place.stage]));
    __syncwarp();  // so that no lane arrives for a later sample first
    place.next(ring.flight);
  }
  // All blocks of the team have read its word: each has published what this one has gathered. The
  // words of all teams that there could be stay equal, so that no tag in the workspace is ahead of
  // the next launch, which may have other teams: they count on by the samples of the longest team.
  const uint32_t longest = tag - 1 - block.samples + block.samples_of(0);
  if (block.share == 0 && lane < MAX_TEAMS && lane % block.params.ring.teams == block.team)
    block.params.rounds[lane] = longest;
}

template <class Kernel>
__device__ __forceinline__ void ring_apply(const Kernel& kernel, int index) {
  using Block = typename Kernel::Block;
  const Block& block = kernel.block;
  const GroupRing& ring = block.params.ring;
  const RingThread thread = block.thread(index);
  const int pitch = block.rows * block.pitch;  // between two turns
  RingPlace slot, place;
  for (RingSample at = block.start(); block.has(at); block.advance(at)) {
    typename Kernel::Factors factors(kernel, at, thread);
    mbarrier_wait(smem_address(&block.storage.statistics[place.stage]), place.parity);
    block.each_channel(
        thread, [&](int i, int group) { factors.set(i, block.statistics(place.stage)[group]); });
    place.next(ring.flight);
    auto* out = block.output(at) + thread.offset;
    int rest = thread.count;
#pragma unroll 1
    for (int i = 0; i < ring.sample_slots; ++i) {
      typename Block::Values values = {};
      block.read(values, slot, thread);
      block.release(slot, values);
      slot.next(ring.slots);
      block.each_turn(rest, [&](int turn) {
        store_words<Block::VECTOR>(out + turn * pitch, factors.result(values, turn));
      });
      out += Block::TURNS * pitch;
      rest -= Block::TURNS;
    }
  }
}

// To so many registers, of RING_REGISTERS at first.
template <int REGISTERS>
__device__ __forceinline__ void change_registers() {
  if constexpr (REGISTERS < RING_REGISTERS) dealloc_registers<REGISTERS>();
  if constexpr (REGISTERS > RING_REGISTERS) alloc_registers<REGISTERS>();
}

template <class Kernel>
__device__ __forceinline__ void run_ring(const Kernel& kernel) {
  static_assert(
      Kernel::COLLECT_REGISTERS + Kernel::APPLY_REGISTERS + OTHER_REGISTERS <= 3 * RING_REGISTERS,
      "three parts of the block, of CONSUMERS threads each, share them");
  const auto& block = kernel.block;
  if (block.own <= 0) return;
  if (threadIdx.x == 0) block.storage.init(block.params.ring);
  __syncthreads();
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread < CONSUMERS) {
    change_registers<Kernel::COLLECT_REGISTERS>();
    ring_collect(kernel, thread);
  } else if (thread < 2 * CONSUMERS) {
    change_registers<Kernel::APPLY_REGISTERS>();
    ring_apply(kernel, thread - CONSUMERS);
  } else {
    change_registers<OTHER_REGISTERS>();
    const int exchanger = thread - 2 * CONSUMERS;
    if (exchanger >= EXCHANGERS) {
      if (exchanger == EXCHANGERS) ring_load(kernel);
      return;
    }
    if (exchanger == 0) block.storage.first_tag = block.params.rounds[block.team] + 1;
    named_barrier_sync(int(RingBarrier::exchangers), EXCHANGERS);
    const uint32_t tag = block.storage.first_tag;
    if (exchanger < PUBLISHERS) {
      ring_publish(kernel, tag, exchanger);
    } else if (exchanger < PUBLISHERS + 32) {
      ring_reduce(kernel, tag, lane);
    } else {
      ring_gather(kernel, tag, lane);
    }
  }
}
