// Gradients of group_norm_fwd, for groups that fit into registers, channels first. With
// n = (x - mean) * scale and dz = dout * activation'(n * weight + bias):
//   dweight = sum of dz * n over a channel, dbias = sum of dz
//   dx      = scale * (weight * dz - mean of weight * dz - n * mean of weight * dz * n)
//
// dout and x are read once; dz takes the place of dout, rounded, as separate operations would have
// it. A block has one group of some samples, one after the other, or several at a time if they are
// small. The sums of its packs over all of these stay in shared memory and are its share of dweight
// and dbias.
#include "group_shares.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, Layout LAYOUT, int ROW_THREADS,
          int LOADS, int VECTOR, int BLOCKS>
__global__ void __launch_bounds__(block_threads(ROW_THREADS), BLOCKS)
    group_norm_bwd(const __grid_constant__ GroupNormBwdParams params) {
  // ---- which part of which group ----
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR>;
  using Part = GroupPart<Tile, LAYOUT>;
  constexpr int CHANNELS = Part::CHANNELS, ROW_SLOTS = ROW_THREADS * LOADS * CHANNELS;
  const GroupNormShape& shape = params.shape;
  const Part part(shape);
  const int share = int(blockIdx.x) / shape.groups;
  const int group = blockIdx.x - share * shape.groups, first_channel = group * shape.channels;
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight);
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias);
  // Opaque: what the loop does not change would be kept in registers through all of it.
  const auto place = [&](const GroupStrides& strides, int64_t sample) {
    return sample * strides.batch + opaque(first_channel) * strides.channel;
  };
  __shared__ Sums slots[Tile::ROWS * ROW_SLOTS];  // of each channel of each pack
  const int thread = threadIdx.x % ROW_THREADS;
  Sums* const own_slots = slots + Tile::row() * ROW_SLOTS + thread * CHANNELS;
#pragma unroll
  for (int i = 0; i < LOADS * CHANNELS; ++i)
    own_slots[i / CHANNELS * (ROW_THREADS * CHANNELS) + i % CHANNELS] = {0.f, 0.f};

  int parity = 0;
  for (unsigned first = share * Tile::ROWS; first < unsigned(shape.batch);
       first += params.shares * Tile::ROWS, parity ^= 1) {
    // ---- read ----
    const int sample = int(first) + Tile::row();
    const int columns = sample < int(shape.batch) ? part.columns : 0;
    RowPacks<Tile, T> values, gradients;
    values.load(static_cast<const T*>(params.x) + place(params.x_strides, sample), columns);
    gradients.load(static_cast<const T*>(params.dout) + place(params.dout_strides, sample),
                   columns);
    const float* stats = params.stats + 2 * (int64_t(sample) * shape.groups + group);
    const float mean = columns ? stats[0] : 0.f, scale = columns ? stats[1] : 0.f;

    // ---- dz, sums of each pack ----
    Sums sums_of_group = {0.f, 0.f};  // of scale * weight * dz * (x - mean), scale * weight * dz
    int rest = Tile::rest(columns);
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (load * Tile::PITCH >= rest) break;
      const int channel = first_channel + part.channel(shape, load);
      const auto affine = affine_of<CHANNELS>(weight + channel, bias + channel, mean, scale);
      Sums sums[CHANNELS] = {};
      gradients.packs[load] =
          add_to_sums<ACTIVATION>(values.packs[load], gradients.packs[load], affine, sums);
#pragma unroll
      for (int i = 0; i < CHANNELS; ++i) {
        Sums& slot = own_slots[load * (ROW_THREADS * CHANNELS) + i];
        slot = slot + Sums{scale * sums[i].first, sums[i].second};
        sums_of_group =
            sums_of_group + Sums{affine.scale[i] * sums[i].first, affine.scale[i] * sums[i].second};
      }
    }

    // ---- means of the group ----
    __shared__ Sums of_warps[2][MAX_WARPS];
    sums_of_group = group_sum<ROW_THREADS>(sums_of_group, of_warps[parity]);
    InputGradient constants[CHANNELS];
#pragma unroll
    for (InputGradient& constant : constants)
      constant = {-scale * scale * shape.inverse_size * sums_of_group.first,
                  -shape.inverse_size * sums_of_group.second};

    // ---- dx ----
    T* dx = opaque(static_cast<T*>(params.dx) + place(params.dx_strides, sample) + Tile::column(0));
    rest = Tile::rest(columns);
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (load * Tile::PITCH >= rest) break;
      const int channel = first_channel + part.channel(shape, load);
      const auto affine = affine_of<CHANNELS>(weight + channel, bias + channel, mean, scale);
      const auto result = dx_of(values.packs[load], affine, constants,
                                [&](int i) { return gradients.at(load, i); });
      store_words<VECTOR>(dx + load * Tile::PITCH, result);
    }
  }

  __syncthreads();
  add_up_group<CHANNELS, Tile, WEIGHT>(params, slots, ROW_SLOTS);
}
