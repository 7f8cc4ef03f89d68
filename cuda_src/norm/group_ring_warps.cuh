// The warps of a ring (group_ring.cuh), and what those do that neither collect nor apply. A Kernel
// has its `block`, collect(thread) and apply(thread), with so many registers each, and
//   part(tensor, at)         where this block's part of a tensor begins
//   Giver(block, lane)       of a warp: give(place) hands to those that collect what they need to
//                            know of the groups of the next sample beforehand
//   merge(each_run, lanes)   a Sum of the runs of a group that each_run(add) hands to
//                            add(count, run) in so many neighbouring threads; + adds up blocks
//   about(group)             what found() needs besides, asked before the wait for other blocks;
//                            the groups are counted on from sample to sample
//   found(sum, about, lane)  what apply() needs to know, from the Sum of all blocks
#pragma once
#include "group_ring.cuh"

constexpr int RECORDS = 3;  // that a lane asks for at once: a step takes the way to the L2 and back

// A record has up to three numbers.
template <class V>
__device__ __forceinline__ void send(uint4* record, const V& v, uint32_t tag) {
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
// which is loaded, whatever of it is of this block.
template <class Kernel>
__device__ __forceinline__ void ring_load(const Kernel& kernel) {
  using T = typename Kernel::Block::Type;
  constexpr int TENSORS = Kernel::Block::TENSORS;
  const auto& block = kernel.block;
  const GroupRing& ring = block.params.ring;
  RingPlace slot;
  for (RingSample at = block.start(); block.has(at); block.advance(at)) {
    const T* data[TENSORS];
#pragma unroll
    for (int tensor = 0; tensor < TENSORS; ++tensor) data[tensor] = kernel.part(tensor, at);
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
__device__ __forceinline__ void ring_tell(const Kernel& kernel, uint32_t tag, int thread) {
  constexpr int VECTOR = Kernel::Block::VECTOR;
  const auto& block = kernel.block;
  const int groups = block.groups, width = block.width;
  const int rows = min(block.rows, block.own);  // that have positions
  int lanes = 32;                               // of a group
  while (lanes > 1 && lanes * groups > SENDERS) lanes /= 2;
  // A warp without a group would wait by parity, and nobody for it: it could fall behind for good.
  if (thread / 32 * 32 / lanes >= groups) return;
  const int lane = thread % lanes;
  RingPlace place;
  for (int round = 0; round < block.samples; ++round, ++tag) {
    const float2* const runs = block.runs(place.stage);
    mbarrier_wait(smem_address(&block.storage.collected[place.stage]), place.parity);
    for (int base = 0; base < groups; base += SENDERS / lanes) {
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
      const auto sum = kernel.merge(each_run, lanes);
      if (lane == 0 && group < groups) send(block.told(place.stage, group) + block.share, sum, tag);
    }
    __syncwarp();
    place.next(block.params.ring.flight);
  }
}

template <class Kernel>
__device__ __forceinline__ void ring_sum_up(const Kernel& kernel, uint32_t tag, int lane) {
  using Sum = typename Kernel::Sum;
  const auto& block = kernel.block;
  const GroupRing& ring = block.params.ring;
  RingPlace place;
  for (RingSample at = block.start(); block.has(at); block.advance(at), ++tag) {
    for (int group = block.share; group < block.groups; group += ring.blocks) {
      const auto about = kernel.about(block.first_group(at) + group);
      const uint4* records = block.told(place.stage, group);
      Sum sum = {};
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
          if (first + 32 * i < ring.blocks) sum = sum + from_record<Sum>(v[i]);
      }
      __syncwarp();
      const auto found = kernel.found(sum_of_neighbours<32>(sum), about, lane);
      if (lane == 0) send(block.found(place.stage, group), found, tag);
    }
    place.next(ring.flight);
  }
}

template <class Kernel>
__device__ __forceinline__ void ring_receive(const Kernel& kernel, uint32_t tag, int lane) {
  const auto& block = kernel.block;
  const GroupRing& ring = block.params.ring;
  typename Kernel::Giver giver(block, lane);
  for (int i = 0; i < ring.flight; ++i) giver.give(i);
  RingPlace place;
  for (int round = 0; round < block.samples; ++round, ++tag) {
    mbarrier_wait(smem_address(&block.storage.collected[place.stage]), place.parity);
    giver.give(place.stage);  // the place of the one just collected
    for (int group = lane; group < block.groups; group += 32) {
      uint4 v;
      do {
        v = ld_relaxed_b128(block.found(place.stage, group));
      } while (v.w != tag);
      block.known(place.stage)[group] = from_record<float4>(v);
    }
    mbarrier_arrive(smem_address(&block.storage.known[place.stage]));
    __syncwarp();  // so that no lane arrives for a later sample first
    place.next(ring.flight);
  }
  // All blocks of the team have read its word: each has told what this one has heard of. The words
  // of all teams that there could be stay equal, so that no tag in the workspace is ahead of the
  // next launch, which may have other teams: they count on by the samples of the longest team.
  const uint32_t longest = tag - 1 - block.samples + block.samples_of(0);
  if (block.share == 0 && lane < MAX_TEAMS && lane % block.params.ring.teams == block.team)
    block.params.rounds[lane] = longest;
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
    kernel.collect(thread);
  } else if (thread < 2 * CONSUMERS) {
    change_registers<Kernel::APPLY_REGISTERS>();
    kernel.apply(thread - CONSUMERS);
  } else {
    change_registers<OTHER_REGISTERS>();
    const int teller = thread - 2 * CONSUMERS;
    if (teller >= TELLERS) {
      if (teller == TELLERS) ring_load(kernel);
      return;
    }
    if (teller == 0) block.storage.first_tag = block.params.rounds[block.team] + 1;
    named_barrier_sync(TELLERS_BARRIER, TELLERS);
    const uint32_t tag = block.storage.first_tag;
    if (teller < SENDERS) {
      ring_tell(kernel, tag, teller);
    } else if (teller < SENDERS + 32) {
      ring_sum_up(kernel, tag, lane);
    } else {
      ring_receive(kernel, tag, lane);
    }
  }
}
