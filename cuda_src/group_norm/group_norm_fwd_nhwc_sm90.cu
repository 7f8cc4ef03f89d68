// GroupNorm and activation in NHWC with one read, through a ring (nhwc_ring.cuh; affine.cuh has the
// formulas). The partial statistics are moments, the statistics mean and 1 / deviation.
//
// Microseconds on an H200, this kernel for group_norm_fwd_steps in its place (bfloat16, SiLU, 32
// groups):
//   2x320x64x64 13.9 for 17.5, 64x320x64x64 107.9 for 138.6, 8x640x64x64 34.9 for 42.5,
//   8x128x256x256 90.6 for 117.2
#include "nhwc_ring_warps.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION>
struct ForwardKernel {
  static constexpr int COLLECT_REGISTERS = 72, APPLY_REGISTERS = 112;
  using Block = RingBlock<T, 1>;
  static constexpr int VECTOR = Block::VECTOR;
  const Block block;

  struct InputLoader {  // the threads that collect need nothing but x
    __device__ InputLoader(const Block&, int) {}
    __device__ void load(int) {}
  };

  // Sums of the deviations of each column from the first value of its run, and of their squares.
  struct Collector {
    const ForwardKernel& kernel;
    const RingThread& thread;
    DeviationSums<VECTOR> sums;

    __device__ Collector(const ForwardKernel& kernel, const RingThread& thread)
        : kernel(kernel), thread(thread) {}

    __device__ void begin(RingSample, RingPlace) { sums = {}; }

    __device__ __forceinline__ void start(const Words<T, VECTOR>& first) {
      const Block& block = kernel.block;
      float origin = 0.f;
      int left = thread.column - thread.group * block.width;
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        if (k == 0 || left == 0) origin = first.at(k);
        if (++left == block.width) left = 0;
        sums.origins[k] = origin;
      }
    }

    __device__ __forceinline__ void add(const typename Block::Values& values, int turn, RingPlace) {
      sums.add(values[0][turn]);
    }

    __device__ void end(RingPlace) {}

    // The mean of a run, and the squares of the deviations from it.
    __device__ __forceinline__ float2 run(int low, int high) const {
      Sums sum = {0.f, 0.f};
      float origin = 0.f;
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        if (k >= low && k < high) sum = sum + sums.sums[k], origin = sums.origins[k];
      }
      const float shift = sum.first * rcp_approx(float(thread.count * (high - low)));
      return make_float2(origin + shift, sum.second - sum.first * shift);
    }

    __device__ void end_slice(int) {}
  };

  using Partial = Moments;

  template <class EachRun>
  __device__ static Partial merge(EachRun each_run, int lanes) {
    return moments_of_parts(each_run, lanes);
  }

  // The index of the group, where its statistics are stored.
  __device__ static int64_t prefetch(int64_t group) { return group; }

  __device__ float2 statistics(const Moments& moments, int64_t group, int lane) const {
    const float2 result = make_float2(moments.mean, inverse_deviation(moments, block.params.shape));
    if (lane == 0 && block.params.stats)
      reinterpret_cast<float2*>(block.params.stats)[group] = result;
    return result;
  }

  struct Factors {
    Words<WEIGHT, VECTOR> weight, bias;
    Affine<ACTIVATION, T, VECTOR> affine;

    __device__ Factors(const ForwardKernel& kernel, RingSample at, const RingThread& thread) {
      weight = kernel.block.template of_channels<WEIGHT>(kernel.block.params.weight, at, thread);
      bias = kernel.block.template of_channels<WEIGHT>(kernel.block.params.bias, at, thread);
    }

    __device__ __forceinline__ void set(int i, float4 statistics) {
      affine.set(i, statistics.x, statistics.y, weight.at(i), bias.at(i));
    }

    __device__ __forceinline__ Words<T, VECTOR> result(const typename Block::Values& values,
                                                       int turn) const {
      return activated(values[0][turn], affine);
    }
  };
};

template <typename T, typename WEIGHT, Activation ACTIVATION>
__global__ void __launch_bounds__(RING_THREADS, 1)
    group_norm_fwd_nhwc_sm90(const __grid_constant__ GroupNormRingParams params) {
  extern __shared__ __align__(128) unsigned char smem[];
  [[maybe_unused]] __shared__ RingStorage storage;  // NVRTC 12.3 overlooks its use
  run_ring(ForwardKernel<T, WEIGHT, ACTIVATION>{{params, storage, smem}});
}
