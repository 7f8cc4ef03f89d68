// The first pass of the backward of groups that do not fit into the registers of a block: shares of
// dweight and dbias of each sample (see group_norm_bwd), from which group_norm_bwd_apply computes
// dx. `splits` blocks share the rows (channels last) or the columns (channels first) of a channel.
#include "group_tile.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

template <typename T, typename WEIGHT, Activation ACTIVATION, bool CHANNELS_LAST, int VECTOR>
__global__ void __launch_bounds__(THREADS, min_blocks(THREADS, 128))
    group_norm_bwd_sums(const __grid_constant__ GroupNormBwdParams params) {
  const GroupNormShape& shape = params.shape;
  const int group_width = group_channels<CHANNELS_LAST>(shape);
  const int channels = shape.groups * group_width;

  // ---- which channels: one, or one pack for each lane ----
  constexpr int CHANNELS = CHANNELS_LAST ? 32 * VECTOR : 1;
  const int blocks = ceil_div(channels, CHANNELS);
  const int block = blockIdx.x % blocks;
  const int split = blockIdx.x / blocks % shape.splits;
  const int64_t batch = blockIdx.x / blocks / shape.splits;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel = block * CHANNELS + (CHANNELS_LAST ? lane * VECTOR : 0);
  const bool inside = channel < channels;
  const int group = inside ? channel / group_width : 0;
  const int in_group = inside ? channel % group_width : 0;
  const float* stats = params.stats + 2 * (batch * shape.groups + group);
  const float mean = stats[0], scale = stats[1];
  const Position origin = {CHANNELS_LAST ? 0 : in_group, CHANNELS_LAST ? in_group : 0};
  const auto base = [&](const void* data, const GroupStrides& strides) {
    return static_cast<const T*>(data) + batch * strides.batch + group * strides.group +
           offset(strides, origin);
  };
  const T* x = base(params.x, params.x_strides);
  const T* dout = base(params.dout, params.dout_strides);
  const int first_channel = group * group_width;
  const auto weights = load_channels<CHANNELS_LAST, VECTOR>(
      static_cast<const WEIGHT*>(params.weight) + first_channel, origin);
  const auto biases = load_channels<CHANNELS_LAST, VECTOR>(
      static_cast<const WEIGHT*>(params.bias) + first_channel, origin);

  // ---- sums of this thread ----
  Sums sums[VECTOR] = {};
  const int steps = CHANNELS_LAST ? shape.rows : shape.columns / VECTOR;
  const int width = CHANNELS_LAST ? WARPS : THREADS;  // steps of a block side by side
  const int64_t x_step = CHANNELS_LAST ? params.x_strides.row : VECTOR;
  const int64_t dout_step = CHANNELS_LAST ? params.dout_strides.row : VECTOR;
  if (inside) {
#pragma unroll 2
    for (int64_t step = split * width + (CHANNELS_LAST ? warp : int(threadIdx.x)); step < steps;
         step += shape.splits * width) {
      const auto x_pack = load_pack<VECTOR>(x + step * x_step);
      const auto dout_pack = load_pack<VECTOR>(dout + step * dout_step);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const Element e =
            element_of<ACTIVATION>(to_float(x_pack.values[i]), to_float(dout_pack.values[i]), mean,
                                   scale, weights.values[i], biases.values[i]);
        sums[CHANNELS_LAST ? i : 0].first += e.dz * e.normal;
        sums[CHANNELS_LAST ? i : 0].second += e.dz;
      }
    }
  }

  // ---- sums of the block ----
  const int64_t row = batch * shape.splits + split;
  const int64_t rows = shape.batch * shape.splits;
  if constexpr (CHANNELS_LAST) {
    __shared__ Sums shared[WARPS][32 * VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) shared[warp][lane * VECTOR + i] = sums[i];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * VECTOR; i += THREADS) {
      const int own = block * CHANNELS + i;
      if (own >= channels) continue;
      Sums sum = shared[0][i];
      for (int w = 1; w < WARPS; ++w) sum = sum + shared[w][i];
      params.partials[row * channels + own] = sum.first;
      params.partials[(rows + row) * channels + own] = sum.second;
    }
  } else {
    __shared__ Sums scratch[MAX_WARPS];
    const Sums sum = group_sum<THREADS>(sums[0], scratch);
    if (threadIdx.x == 0) {
      params.partials[row * channels + channel] = sum.first;
      params.partials[(rows + row) * channels + channel] = sum.second;
    }
  }
}
