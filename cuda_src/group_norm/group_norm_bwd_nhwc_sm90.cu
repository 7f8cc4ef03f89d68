// Gradients of GroupNorm in NHWC with one read, through a ring (nhwc_ring.cuh; affine.cuh has the
// formulas). The partial statistics are the sums of weight * dz * n and weight * dz, the statistics
// what dx needs of their means. dz takes the place of dout in the slot, rounded, as separate
// operations would have it. The threads that collect keep the sums of their columns over all
// samples of the team (the same slice of all); those of a block are its share of dweight and dbias,
// which sum_partials adds up.
//
// Microseconds on an H200, this kernel for group_norm_bwd_steps in its place (bfloat16, SiLU, 32
// groups):
//   2x320x64x64 18.2 for 25.9, 64x320x64x64 172.5 for 226.7, 8x640x64x64 54.5 for 70.0,
//   8x128x256x256 156.8 for 180.3
#include "nhwc_ring_warps.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION>
struct BackwardKernel {
  static constexpr int COLLECT_REGISTERS = 104, APPLY_REGISTERS = RING_REGISTERS;
  using Block = RingBlock<T, 2>;  // x and dout
  static constexpr int VECTOR = Block::VECTOR;
  const Block block;

  // Mean and 1 / deviation of the groups, read a sample before they are stored.
  struct InputLoader {
    static constexpr int GROUPS = MAX_RING_GROUPS / 32;  // of a lane
    const Block& block;
    int lane;
    RingSample at;  // whose they are
    float2 next[GROUPS] = {};

    __device__ InputLoader(const Block& block, int lane)
        : block(block), lane(lane), at(block.start()) {
      read();
    }

    __device__ void read() {
      const float2* stats =
          reinterpret_cast<const float2*>(block.params.stats) + block.first_group(at);
#pragma unroll
      for (int i = 0; i < GROUPS; ++i)
        if (block.has(at) && lane + i * 32 < block.groups) next[i] = stats[lane + i * 32];
    }

    __device__ void load(int place) {
      if (!block.has(at)) return;
#pragma unroll
      for (int i = 0; i < GROUPS; ++i)
        if (lane + i * 32 < block.groups) block.group_inputs(place)[lane + i * 32] = next[i];
      mbarrier_arrive(smem_address(&block.storage.inputs[place]));
      block.advance(at);
      read();
    }
  };

  struct Collector {
    const Block& block;
    const RingThread& thread;
    Affine<ACTIVATION, T, VECTOR> affine;
    Sums sums[VECTOR];         // of a sample: of dz * (x - centre), dz
    Sums totals[VECTOR] = {};  // of dz * n, dz

    __device__ Collector(const BackwardKernel& kernel, const RingThread& thread)
        : block(kernel.block), thread(thread) {}

    __device__ __forceinline__ void begin(RingSample at, RingPlace place) {
      const auto weight = block.template of_channels<WEIGHT>(block.params.weight, at, thread);
      const auto bias = block.template of_channels<WEIGHT>(block.params.bias, at, thread);
      mbarrier_wait(smem_address(&block.storage.inputs[place.stage]), place.parity);
      block.each_channel(thread, [&](int i, int group) {
        const float2 stats = block.group_inputs(place.stage)[group];
        affine.set(i, stats.x, stats.y, weight.at(i), bias.at(i));
        sums[i] = {0.f, 0.f};
      });
    }

    __device__ void start(const Words<T, VECTOR>&) {}

    __device__ __forceinline__ void add(const typename Block::Values& values, int turn,
                                        RingPlace slot) {
      float dz[VECTOR];
      add_gradients(values[0][turn], values[1][turn], affine, dz, sums);
      *reinterpret_cast<uint4*>(block.pack(slot, 1, thread.index, turn)) =
          bits_of(round_words<T>(dz));
    }

    // The sums become those of weight * dz * n / deviation and weight * dz / deviation.
    __device__ __forceinline__ void end(RingPlace place) {
      fence_async_proxy();  // the copy engine fills the slots anew
      block.each_channel(thread, [&](int i, int group) {
        const float2 stats = block.group_inputs(place.stage)[group];
        const Sums sum = channel_sums<decltype(affine)::CENTRED>(sums[i], stats.x, stats.y);
        totals[i] = totals[i] + sum;
        sums[i] = {affine.scale[i] * sum.first, affine.scale[i] * sum.second};
      });
    }

    __device__ __forceinline__ float2 run(int low, int high) const {
      Sums sum = {0.f, 0.f};
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        if (k >= low && k < high) sum = sum + sums[k];
      }
      return make_float2(sum.first, sum.second);
    }

    // This block's share of dweight and dbias of a slice, one channel of each pack after the other.
    __device__ __forceinline__ void end_slice(int slice) {
      const GroupRing& ring = block.params.ring;
      const int64_t plane = int64_t(ring.teams) * ring.blocks * block.pitch;
      float* const share = block.params.shares +
                           int64_t(block.team * ring.blocks + block.share) * block.pitch +
                           slice * block.channels + thread.index * VECTOR;
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        Sums* const columns = block.columns(k % 2);
        columns[thread.index] = totals[k];
        totals[k] = {0.f, 0.f};
        named_barrier_sync(int(RingBarrier::collectors), CONSUMERS);
        if (thread.index >= block.row_packs) continue;
        Sums sum = {0.f, 0.f};
        for (int row = 0; row < block.rows; ++row)
          sum = sum + columns[row * block.row_packs + thread.index];
        share[k] = sum.first;
        share[plane + k] = sum.second;
      }
    }
  };

  using Partial = Sums;

  template <class EachRun>
  __device__ static Partial merge(EachRun each_run, int lanes) {
    Sums sum = {0.f, 0.f};
    each_run([&](float, Sums run) { sum = sum + run; });
    return sum_of_lanes(sum, lanes);
  }

  // Mean, 1 / deviation.
  __device__ float2 prefetch(int64_t group) const {
    return reinterpret_cast<const float2*>(block.params.stats)[group];
  }

  // dx = scale * weight * dz + slope * x + constant.
  __device__ float3 statistics(Sums sums, float2 stats, int) const {
    const float share = 1.f / ARGUMENT_SCALE<ACTIVATION> * block.params.shape.inverse_size;
    const auto gradient =
        InputGradient::of<false>(stats.x, stats.y, {share * sums.first, share * sums.second});
    return make_float3(gradient.slope, gradient.constant, stats.y);
  }

  struct Factors {
    Words<WEIGHT, VECTOR> weight;
    float slope[VECTOR], constant[VECTOR], scale[VECTOR];

    __device__ Factors(const BackwardKernel& kernel, RingSample at, const RingThread& thread)
        : weight(
              kernel.block.template of_channels<WEIGHT>(kernel.block.params.weight, at, thread)) {}

    __device__ __forceinline__ void set(int i, float4 statistics) {
      slope[i] = statistics.x;
      constant[i] = statistics.y;
      scale[i] = statistics.z * weight.at(i);
    }

    __device__ __forceinline__ Words<T, VECTOR> result(const typename Block::Values& values,
                                                       int turn) const {
      float dx[VECTOR];
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        const float of_x = slope[k] * values[0][turn].at(k) + constant[k];
        dx[k] = scale[k] * values[1][turn].at(k) + of_x;
      }
      return round_words<T>(dx);
    }
  };
};

template <typename T, typename WEIGHT, Activation ACTIVATION>
__global__ void __launch_bounds__(RING_THREADS, 1)
    group_norm_bwd_nhwc_sm90(const __grid_constant__ GroupNormRingParams params) {
  extern __shared__ __align__(128) unsigned char smem[];
  [[maybe_unused]] __shared__ RingStorage storage;  // NVRTC 12.3 overlooks its use
  run_ring(BackwardKernel<T, WEIGHT, ACTIVATION>{{params, storage, smem}});
}
