// group_norm_bwd_last with one read, through a ring (group_ring.cuh). With n = (x - mean) * scale
// and dz = dout * activation'(n * weight + bias):
//   dweight = sum of dz * n over a channel, dbias = sum of dz
//   dx      = scale * (weight * dz - mean of weight * dz - n * mean of weight * dz * n)
//
// Collected are the sums of weight * dz * n and weight * dz, found is what dx needs of their means.
// dz takes the place of dout in the slot, rounded, as separate operations would have it. The
// threads that collect keep the sums of their columns over all samples of the team (the same slice
// of all); those of a block are its share of dweight and dbias, which sum_partials adds up.
#include "group_ring_warps.cuh"

constexpr int COLLECTED_BARRIER = 2;  // of those that collect

template <typename T, typename WEIGHT, Activation ACTIVATION>
struct BackwardKernel {
  static constexpr int COLLECT_REGISTERS = 104, APPLY_REGISTERS = RING_REGISTERS;
  using Block = RingBlock<GroupNormBwdRingBase, T, 2>;
  static constexpr int VECTOR = Block::VECTOR;
  const Block block;

  // Tensor 0 is x, tensor 1 dout.
  __device__ const T* part(int tensor, RingSample at) const {
    const auto& params = block.params;
    const void* data = tensor ? params.dout : params.x;
    return block.part(static_cast<const T*>(data), tensor ? params.dout_strides : params.x_strides,
                      at);
  }

  // Mean and 1 / deviation of the groups, loaded a sample before.
  struct Giver {
    static constexpr int GROUPS = MAX_RING_GROUPS / 32;  // of a lane
    const Block& block;
    int lane;
    RingSample at;  // whose they are
    float2 next[GROUPS] = {};

    __device__ Giver(const Block& block, int lane) : block(block), lane(lane), at(block.start()) {
      load();
    }

    __device__ void load() {
      const float2* stats =
          reinterpret_cast<const float2*>(block.params.stats) + block.first_group(at);
#pragma unroll
      for (int i = 0; i < GROUPS; ++i)
        if (block.has(at) && lane + i * 32 < block.groups) next[i] = stats[lane + i * 32];
    }

    __device__ void give(int place) {
      if (!block.has(at)) return;
#pragma unroll
      for (int i = 0; i < GROUPS; ++i)
        if (lane + i * 32 < block.groups) block.given(place)[lane + i * 32] = next[i];
      mbarrier_arrive(smem_address(&block.storage.given[place]));
      block.advance(at);
      load();
    }
  };

  __device__ __forceinline__ void collect(int index) const {
    const auto& params = block.params;
    const GroupRing& ring = params.ring;
    const RingThread thread = block.thread(index);
    Sums totals[VECTOR] = {};  // of dz * n, dz
    RingPlace slot, place;
    RingSample at = block.start();
    while (block.has(at)) {
      const int slice = at.slice, channel = slice * block.channels + thread.column;
      Words<WEIGHT, VECTOR> weight = {}, bias = {};
      if (thread.count) {
        weight = load_words<VECTOR>(static_cast<const WEIGHT*>(params.weight) + channel);
        bias = load_words<VECTOR>(static_cast<const WEIGHT*>(params.bias) + channel);
      }
      mbarrier_wait(smem_address(&block.storage.given[place.stage]), place.parity);
      const float2* const given = block.given(place.stage);
      Affine<VECTOR> affine;
      block.each_channel(thread, [&](int i, int group) {
        affine.mean[i] = given[group].x;
        affine.scale[i] = given[group].y * weight.at(i);
        affine.bias[i] = bias.at(i);
      });
      const Argument<ACTIVATION, T, VECTOR> argument(affine);

      // ---- dz, sums of each column ----
      Sums sums[VECTOR] = {};  // of dz * (x - argument.mean), dz
      int rest = thread.count;
#pragma unroll 1
      for (int i = 0; i < ring.sample_slots; ++i) {
        typename Block::Values values, gradients = {};
        block.wait(slot);
        block.read(values, slot, 0, thread.reader);
        // Where a thread has no pack, its reader writes what it read.
        if (thread.count) block.read(gradients, slot, 1, thread.reader);
        block.each_turn(rest, [&](int turn) {
          float dz[VECTOR];
#pragma unroll
          for (int k = 0; k < VECTOR; ++k) {
            const float x = values[turn].at(k);
            dz[k] = gradients[turn].at(k) * slope_scaled<ACTIVATION>(argument.of(x, k));
            sums[k].first += dz[k] * (x - argument.mean[k]);
            sums[k].second += dz[k];
          }
          block.write(slot, 1, index, turn, dz);
        });
        rest -= Block::TURNS;
        slot.next(ring.slots);
      }
      fence_async_proxy();  // the copy engine fills the slots anew

      block.each_channel(thread, [&](int i, int group) {
        if (!argument.CENTRED) sums[i].first -= given[group].x * sums[i].second;
        totals[i] = totals[i] + Sums{given[group].y * sums[i].first, sums[i].second};
        const float scale = argument.scale[i];
        sums[i] = {scale * sums[i].first, scale * sums[i].second};
      });
      block.hand_over(thread, index, place, [&](int low, int high) {
        Sums sum = {0.f, 0.f};
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
          if (k >= low && k < high) sum = sum + sums[k];
        }
        return make_float2(sum.first, sum.second);
      });
      place.next(ring.flight);
      block.advance(at);
      if (at.slice > slice) write_share(totals, index, slice);
    }
  }

  // This block's share of dweight and dbias of a slice, one channel of each pack after the other.
  __device__ __forceinline__ void write_share(Sums (&totals)[VECTOR], int index, int slice) const {
    const GroupRing& ring = block.params.ring;
    const int64_t plane = int64_t(ring.teams) * ring.blocks * block.pitch;
    float* const share = block.params.partials +
                         int64_t(block.team * ring.blocks + block.share) * block.pitch +
                         slice * block.channels + index * VECTOR;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      Sums* const columns = block.columns(k % 2);
      columns[index] = totals[k];
      totals[k] = {0.f, 0.f};
      named_barrier_sync(COLLECTED_BARRIER, CONSUMERS);
      if (index >= block.row_packs) continue;
      Sums sum = {0.f, 0.f};
      for (int row = 0; row < block.rows; ++row) sum = sum + columns[row * block.row_packs + index];
      share[k] = sum.first;
      share[plane + k] = sum.second;
    }
  }

  using Sum = Sums;

  template <class EachRun>
  __device__ static Sum merge(EachRun each_run, int lanes) {
    Sums sum = {0.f, 0.f};
    each_run([&](float, Sums run) { sum = sum + run; });
    return sum_of_lanes(sum, lanes);
  }

  // Mean, 1 / deviation.
  __device__ float2 about(int64_t group) const {
    return reinterpret_cast<const float2*>(block.params.stats)[group];
  }

  // dx = scale * weight * dz + slope * x + constant.
  __device__ float3 found(Sum sums, float2 stats, int) const {
    const float inverse = -block.params.shape.inverse_size / ARGUMENT_SCALE<ACTIVATION>;
    const float slope = inverse * stats.y * stats.y * sums.first;
    return make_float3(slope, inverse * sums.second - slope * stats.x, stats.y);
  }

  __device__ __forceinline__ void apply(int index) const {
    const auto& params = block.params;
    const GroupRing& ring = params.ring;
    const RingThread thread = block.thread(index);
    const int pitch = block.rows * block.pitch;  // between two turns
    RingPlace slot, place;
    for (RingSample at = block.start(); block.has(at); block.advance(at)) {
      const int channel = at.slice * block.channels + thread.column;
      Words<WEIGHT, VECTOR> weight = {};
      if (thread.count)
        weight = load_words<VECTOR>(static_cast<const WEIGHT*>(params.weight) + channel);
      mbarrier_wait(smem_address(&block.storage.known[place.stage]), place.parity);
      float slope[VECTOR], constant[VECTOR], scale[VECTOR];
      block.each_channel(thread, [&](int i, int group) {
        const float4 found = block.known(place.stage)[group];
        slope[i] = found.x;
        constant[i] = found.y;
        scale[i] = found.z * weight.at(i);
      });
      place.next(ring.flight);

      T* dx = block.part(static_cast<T*>(params.dx), params.dx_strides, at) + thread.offset;
      int rest = thread.count;
#pragma unroll 1
      for (int i = 0; i < ring.sample_slots; ++i) {
        typename Block::Values values, gradients;
        block.wait(slot);
        block.read(values, slot, 0, thread.reader);
        block.read(gradients, slot, 1, thread.reader);
        block.release(slot, values, gradients);
        slot.next(ring.slots);
        block.each_turn(rest, [&](int turn) {
          float result[VECTOR];
#pragma unroll
          for (int k = 0; k < VECTOR; ++k) {
            const float of_x = slope[k] * values[turn].at(k) + constant[k];
            result[k] = scale[k] * gradients[turn].at(k) + of_x;
          }
          store_words<VECTOR>(dx + turn * pitch, round_words<T>(result));
        });
        dx += Block::TURNS * pitch;
        rest -= Block::TURNS;
      }
    }
  }
};

template <typename T, typename WEIGHT, Activation ACTIVATION>
__global__ void __launch_bounds__(RING_THREADS, 1)
    group_norm_bwd_ring_sm90(const __grid_constant__ GroupNormBwdRingParams params) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RingStorage storage;
  run_ring(BackwardKernel<T, WEIGHT, ACTIVATION>{{params.base, params.maps, storage, smem}});
}
