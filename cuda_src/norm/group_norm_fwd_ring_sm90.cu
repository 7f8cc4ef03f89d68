// group_norm_fwd with channels last and one read, through a ring (group_ring.cuh): collected are
// moments, found is the mean and 1 / deviation.
#include "group_ring_warps.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION>
struct ForwardKernel {
  static constexpr int COLLECT_REGISTERS = 72, APPLY_REGISTERS = 112;
  using Block = RingBlock<GroupNormFwdRingBase, T, 1>;
  static constexpr int VECTOR = Block::VECTOR;
  const Block block;

  __device__ const T* part(int, RingSample at) const {
    return block.part(static_cast<const T*>(block.params.x), block.params.x_strides, at);
  }

  // Those that collect need nothing but x.
  struct Giver {
    __device__ Giver(const Block&, int) {}
    __device__ void give(int) {}
  };

  __device__ __forceinline__ void collect(int index) const {
    const GroupRing& ring = block.params.ring;
    const RingThread thread = block.thread(index);
    RingPlace slot, place;
    for (int round = 0; round < block.samples; ++round) {
      // ---- sums of the deviations of each column from the first value of its run ----
      ColumnSums<VECTOR> sums;
      int rest = thread.count;
#pragma unroll 1
      for (int i = 0; i < ring.sample_slots; ++i) {
        typename Block::Values values;
        block.wait(slot);
        block.read(values, slot, 0, thread.reader);
        if (i == 0) {
          float origin = 0.f;
          int left = thread.column - thread.group * block.width;
#pragma unroll
          for (int k = 0; k < VECTOR; ++k) {
            if (k == 0 || left == 0) origin = values[0].at(k);
            if (++left == block.width) left = 0;
            sums.origins[k] = origin;
          }
        }
        block.each_turn(rest, [&](int turn) { sums.add(values[turn]); });
        rest -= Block::TURNS;
        slot.next(ring.slots);
      }
      // ---- mean of each run, and squares of the deviations from it ----
      block.hand_over(thread, index, place, [&](int low, int high) {
        Sums sum = {0.f, 0.f};
        float origin = 0.f;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
          if (k >= low && k < high) sum = sum + sums.sums[k], origin = sums.origins[k];
        }
        const float shift = sum.first * rcp_approx(float(thread.count * (high - low)));
        return make_float2(origin + shift, sum.second - sum.first * shift);
      });
      place.next(ring.flight);
    }
  }

  using Sum = Moments;

  template <class EachRun>
  __device__ static Sum merge(EachRun each_run, int lanes) {
    return moments_of_parts(each_run, lanes);
  }

  // Nothing but which one it is: there its statistics go.
  __device__ static int64_t about(int64_t group) { return group; }

  __device__ float2 found(Sum moments, int64_t group, int lane) const {
    const auto& params = block.params;
    const float scale = rsqrtf(moments.m2 * params.shape.inverse_size + params.shape.eps);
    if (lane == 0 && params.stats) {
      float* stats = params.stats + 2 * group;
      stats[0] = moments.mean, stats[1] = scale;
    }
    return make_float2(moments.mean, scale);
  }

  __device__ __forceinline__ void apply(int index) const {
    const auto& params = block.params;
    const GroupRing& ring = params.ring;
    const RingThread thread = block.thread(index);
    const int pitch = block.rows * block.pitch;  // between two turns
    RingPlace slot, place;
    for (RingSample at = block.start(); block.has(at); block.advance(at)) {
      const int channel = at.slice * block.channels + thread.column;
      Words<WEIGHT, VECTOR> weight = {}, bias = {};
      if (thread.count) {
        weight = load_words<VECTOR>(static_cast<const WEIGHT*>(params.weight) + channel);
        bias = load_words<VECTOR>(static_cast<const WEIGHT*>(params.bias) + channel);
      }
      mbarrier_wait(smem_address(&block.storage.known[place.stage]), place.parity);
      Affine<VECTOR> affine;
      block.each_channel(thread, [&](int i, int group) {
        const float4 stats = block.known(place.stage)[group];
        affine.mean[i] = stats.x;
        affine.scale[i] = stats.y * weight.at(i);
        affine.bias[i] = bias.at(i);
      });
      place.next(ring.flight);

      T* out = block.part(static_cast<T*>(params.out), params.out_strides, at) + thread.offset;
      int rest = thread.count;
#pragma unroll 1
      for (int i = 0; i < ring.sample_slots; ++i) {
        typename Block::Values values;
        block.wait(slot);
        block.read(values, slot, 0, thread.reader);
        block.release(slot, values);
        slot.next(ring.slots);
        block.each_turn(rest, [&](int turn) {
          store_words<VECTOR>(out + turn * pitch, activated<ACTIVATION>(values[turn], affine));
        });
        out += Block::TURNS * pitch;
        rest -= Block::TURNS;
      }
    }
  }
};

template <typename T, typename WEIGHT, Activation ACTIVATION>
__global__ void __launch_bounds__(RING_THREADS, 1)
    group_norm_fwd_ring_sm90(const __grid_constant__ GroupNormFwdRingParams params) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RingStorage storage;
  run_ring(ForwardKernel<T, WEIGHT, ACTIVATION>{{params.base, params.maps, storage, smem}});
}
