// group_norm_fwd with channels last and one read: the blocks, one on each multiprocessor, all of
// them at once (a cooperative launch), form teams. A team takes one sample after the other; each of
// its blocks has the same share of the positions of all of them.
//
// A block's positions pass through a ring of slots in shared memory, each of TURNS positions of
// every row of threads. What which warps do with a sample:
//   load     bulk copies into slots as they become empty
//   collect  CONSUMERS threads: of each slot once it is full, sums for each run of a thread, the
//            neighbouring columns of its pack that are of one group
//   tell     two warps: of each group, the moments of this block's runs, to whoever sums it up
//   sum up   a warp: of some of the groups, the statistics from the moments of all blocks
//   receive  a warp: the statistics of all groups, into shared memory
//   apply    CONSUMERS threads: normalise, activate, write; a slot is empty then
// So while the blocks tell each other about one sample, the next ones are loaded and collected.
//
// Blocks talk through records in global memory, which carry a tag: the number of the sample in the
// team, counted on from launch to launch. A reader loads a record until it has the tag.
//
// Why this ends: a ring holds a sample at least, so that loading and collecting it wait for nothing
// but the samples before it.
//
// Why nothing is overwritten too early: of `flight` samples each has buffers and records of its
// own. Those of a sample are used anew by the sample `flight` later (the other, below), which
// touches none of them before its block has collected it. The last slot of the other was full then;
// since slots < (flight + 1) * sample_slots, what it held before was of the sample or of a later
// one, and all warps had applied it. So this block had received all statistics of the sample, which
// means that all blocks had told what they had to, from the runs, and that it had been read. And
// whoever sums up the other has heard of all blocks that they have collected it, so all of them had
// received what was found about the sample.
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "group_ring.cuh"

template <typename T, int VECTOR>
__device__ __forceinline__ void ring_load(const GroupNormRingParams& params,
                                          const RingShare<T, VECTOR>& share, RingStorage& storage,
                                          unsigned char* smem) {
  RingPlace slot;
  for (int round = 0; round < share.samples; ++round) {
    const T* x = static_cast<const T*>(params.x) +
                 share.sample(params, round) * params.x_strides.batch +
                 int64_t(share.begin) * share.channels;
    for (int i = 0; i < params.sample_slots; ++i) {
      const int rest = share.own - i * share.slot_positions;
      const int elements = max(0, min(share.slot_positions, rest)) * share.channels;
      const uint32_t full = smem_address(&storage.full[slot.stage]);
      mbarrier_wait(smem_address(&storage.empty[slot.stage]), slot.parity ^ 1);
      mbarrier_arrive_expect(full, elements * sizeof(T));
      if (elements) {
        bulk_load(smem_address(smem) + slot.stage * share.slot_bytes, x, elements * sizeof(T),
                  full);
      }
      x += elements;
      slot.next(params.slots);
    }
  }
}

// The turns of a thread in a slot; beyond its last one they are anything.
template <typename T, int VECTOR>
__device__ __forceinline__ void read_slot(Words<T, VECTOR> (&values)[TURNS],
                                          const RingShare<T, VECTOR>& share, RingStorage& storage,
                                          const unsigned char* smem, RingPlace slot, int thread) {
  const unsigned char* data = smem + slot.stage * share.slot_bytes + thread * 16;
  mbarrier_wait(smem_address(&storage.full[slot.stage]), slot.parity);
#pragma unroll
  for (int i = 0; i < TURNS; ++i)
    values[i] =
        load_words<VECTOR>(reinterpret_cast<const T*>(data + i * (share.slot_bytes / TURNS)));
}

template <typename T, int VECTOR>
__device__ __forceinline__ void ring_collect(const GroupNormRingParams& params,
                                             const RingShare<T, VECTOR>& share,
                                             RingStorage& storage, unsigned char* smem,
                                             int thread) {
  const int width = params.shape.channels;
  const int row = thread / share.row_packs, column = (thread - row * share.row_packs) * VECTOR;
  const int count = row < share.rows ? share.count(row) : 0, first_group = column / width;
  const int reader = row < share.rows ? thread : 0;
  RingPlace slot, place;
  for (int round = 0; round < share.samples; ++round) {
    // ---- sums of the deviations of each column from the first value of its run ----
    ColumnSums<VECTOR> sums;
    int rest = count;
#pragma unroll 1
    for (int i = 0; i < params.sample_slots; ++i) {
      Words<T, VECTOR> values[TURNS];
      read_slot(values, share, storage, smem, slot, reader);
      if (i == 0) {
        float origin = 0.f;
        int left = column - first_group * width;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
          if (k == 0 || left == 0) origin = values[0].at(k);
          if (++left == width) left = 0;
          sums.origins[k] = origin;
        }
      }
      if (rest >= TURNS) {
#pragma unroll
        for (int k = 0; k < TURNS; ++k) sums.add(values[k]);
      } else {
#pragma unroll
        for (int k = 0; k < TURNS; ++k) {
          if (k < rest) sums.add(values[k]);
        }
      }
      rest -= TURNS;
      slot.next(params.slots);
    }
    // ---- mean of each run, and squares of the deviations from it ----
    float2* result = share.runs(params, smem, place.stage) + thread;
    int low = first_group * width - column;
    for (int run = 0; run < params.runs; ++run, low += width, result += CONSUMERS) {
      const int high = min(low + width, VECTOR), length = high - max(low, 0);
      Sums sum = {0.f, 0.f};
      float origin = 0.f;
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        if (k >= low && k < high) sum = sum + sums.sums[k], origin = sums.origins[k];
      }
      if (count && length > 0) {
        const float shift = sum.first * rcp_approx(float(count * length));
        *result = make_float2(origin + shift, sum.second - sum.first * shift);
      }
    }
    mbarrier_arrive(smem_address(&storage.collected[place.stage]));
    place.next(params.flight);
  }
}

template <typename T, int VECTOR>
__device__ __forceinline__ void ring_tell(const GroupNormRingParams& params,
                                          const RingShare<T, VECTOR>& share, RingStorage& storage,
                                          unsigned char* smem, uint32_t tag, int thread) {
  const int groups = params.shape.groups, width = params.shape.channels;
  const int rows = min(share.rows, share.own);  // that have positions
  int lanes = 32;                               // of a group
  while (lanes > 1 && lanes * groups > SENDERS) lanes /= 2;
  const int lane = thread % lanes;
  RingPlace place;
  for (int round = 0; round < share.samples; ++round, ++tag) {
    const float2* const runs = share.runs(params, smem, place.stage);
    mbarrier_wait(smem_address(&storage.collected[place.stage]), place.parity);
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
            const float2 run = of_pack[row * share.row_packs];
            add(float(length * share.count(row)), Sums{run.x, run.y});
          }
        }
      };
      const Moments moments = moments_of_parts(each_run, lanes);
      if (lane == 0 && group < groups) {
        send(share.moments(params, place.stage, group) + share.share, moments.count, moments.mean,
             moments.m2, tag);
      }
    }
    __syncwarp();
    place.next(params.flight);
  }
}

template <typename T, int VECTOR>
__device__ __forceinline__ void ring_sum_up(const GroupNormRingParams& params,
                                            const RingShare<T, VECTOR>& share, uint32_t tag,
                                            int lane) {
  const GroupNormShape& shape = params.shape;
  RingPlace place;
  for (int round = 0; round < share.samples; ++round, ++tag) {
    for (int group = share.share; group < shape.groups; group += params.blocks) {
      const uint4* records = share.moments(params, place.stage, group);
      Moments moments = {0.f, 0.f, 0.f};
      for (int i = lane; i < params.blocks; i += 32) {
        const uint4 v = receive(records + i, tag);
        moments =
            moments + Moments{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z)};
      }
      __syncwarp();
      moments = sum_of_neighbours<32>(moments);
      const float scale = rsqrtf(moments.m2 * shape.inverse_size + shape.eps);
      if (lane == 0) {
        send(share.found(params, place.stage, group), moments.mean, scale, 0.f, tag);
        if (params.stats) {
          float* stats = params.stats + 2 * (share.sample(params, round) * shape.groups + group);
          stats[0] = moments.mean, stats[1] = scale;
        }
      }
    }
    place.next(params.flight);
  }
}

template <typename T, int VECTOR>
__device__ __forceinline__ void ring_receive(const GroupNormRingParams& params,
                                             const RingShare<T, VECTOR>& share,
                                             RingStorage& storage, uint32_t tag, int lane) {
  RingPlace place;
  for (int round = 0; round < share.samples; ++round, ++tag) {
    for (int group = lane; group < params.shape.groups; group += 32) {
      const uint4 v = receive(share.found(params, place.stage, group), tag);
      storage.stats[place.stage][group] = make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
    }
    mbarrier_arrive(smem_address(&storage.known[place.stage]));
    __syncwarp();  // so that no lane arrives for a later sample first
    place.next(params.flight);
  }
  // All blocks of the team have read it: each has told what this one has heard of.
  if (share.share == 0 && lane == 0) params.rounds[share.team] = tag - 1;
}

template <typename T, typename WEIGHT, Activation ACTIVATION, int VECTOR>
__device__ __forceinline__ void ring_apply(const GroupNormRingParams& params,
                                           const RingShare<T, VECTOR>& share, RingStorage& storage,
                                           const unsigned char* smem, int thread) {
  const int width = params.shape.channels;
  const int row = thread / share.row_packs, column = (thread - row * share.row_packs) * VECTOR;
  const int count = row < share.rows ? share.count(row) : 0, first_group = column / width;
  const int reader = row < share.rows ? thread : 0;
  const int pitch = share.rows * share.channels;  // between two turns
  RingPlace slot, place;
  for (int round = 0; round < share.samples; ++round) {
    Words<WEIGHT, VECTOR> weight = {}, bias = {};
    if (count) {
      weight = load_words<VECTOR>(static_cast<const WEIGHT*>(params.weight) + column);
      bias = load_words<VECTOR>(static_cast<const WEIGHT*>(params.bias) + column);
    }
    mbarrier_wait(smem_address(&storage.known[place.stage]), place.parity);
    Affine<VECTOR> affine;
    int group = first_group, left = column - group * width;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      const float2 stats = storage.stats[place.stage][min(group, params.shape.groups - 1)];
      affine.mean[k] = stats.x;
      affine.scale[k] = stats.y * weight.at(k);
      affine.bias[k] = bias.at(k);
      if (++left == width) ++group, left = 0;
    }
    place.next(params.flight);

    T* out = static_cast<T*>(params.out) + share.sample(params, round) * params.out_strides.batch +
             int64_t(share.begin) * share.channels + thread * VECTOR;
    int rest = count;
#pragma unroll 1
    for (int i = 0; i < params.sample_slots; ++i) {
      Words<T, VECTOR> values[TURNS];
      read_slot(values, share, storage, smem, slot, reader);
      __syncwarp();
      if (thread % 32 == 0) mbarrier_arrive(smem_address(&storage.empty[slot.stage]));
      slot.next(params.slots);
      if (rest >= TURNS) {
#pragma unroll
        for (int k = 0; k < TURNS; ++k, out += pitch)
          store_words<VECTOR>(out, activated<ACTIVATION>(values[k], affine));
      } else {
#pragma unroll
        for (int k = 0; k < TURNS; ++k) {
          if (k < rest)
            store_words<VECTOR>(out + k * pitch, activated<ACTIVATION>(values[k], affine));
        }
      }
      rest -= TURNS;
    }
  }
}

template <typename T, typename WEIGHT, Activation ACTIVATION>
__global__ void __launch_bounds__(RING_THREADS, 1)
    group_norm_fwd_ring_sm90(const __grid_constant__ GroupNormRingParams params) {
  constexpr int VECTOR = 16 / int(sizeof(T));
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RingStorage storage;
  const RingShare<T, VECTOR> share(params);
  if (share.own <= 0) return;
  if (threadIdx.x == 0) storage.init(params);
  __syncthreads();

  const int thread = threadIdx.x;
  if (thread < CONSUMERS) {
    ring_collect(params, share, storage, smem, thread);
  } else if (thread < 2 * CONSUMERS) {
    ring_apply<T, WEIGHT, ACTIVATION>(params, share, storage, smem, thread - CONSUMERS);
  } else if (thread >= 2 * CONSUMERS + TELLERS) {
    if (thread % 32 == 0) ring_load(params, share, storage, smem);
  } else {
    const int teller = thread - 2 * CONSUMERS, lane = thread % 32;
    if (teller == 0) storage.first_tag = params.rounds[share.team] + 1;
    named_barrier_sync(TELLERS_BARRIER, TELLERS);
    const uint32_t tag = storage.first_tag;
    if (teller < SENDERS) {
      ring_tell(params, share, storage, smem, tag, teller);
    } else if (teller < SENDERS + 32) {
      ring_sum_up(params, share, tag, lane);
    } else {
      ring_receive(params, share, storage, tag, lane);
    }
  }
}
