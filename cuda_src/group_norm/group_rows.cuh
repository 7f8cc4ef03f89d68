// NCHW: the samples of one group that a block has, one after the other, each in ROW_THREADS threads
// of its own. The group of a sample is contiguous.
#pragma once
#include "affine.cuh"

// KEEP_WEIGHTS: for all samples, in registers.
template <class Params, class Tile, typename T, typename WEIGHT, Activation ACTIVATION,
          int CHANNELS, bool KEEP_WEIGHTS>
struct GroupRows {
  using Factors = Affine<ACTIVATION, T, CHANNELS>;
  const Params& params;
  int group, first_channel, size;
  int first;  // sample of the first row of threads
  float weights[Tile::LOADS][CHANNELS], biases[Tile::LOADS][CHANNELS];  // times ARGUMENT

  __device__ explicit GroupRows(const Params& params) : params(params) {
    const GroupNormShape& shape = params.shape;
    const int share = int(blockIdx.x) / shape.groups;
    group = blockIdx.x - share * shape.groups;
    first_channel = group * shape.channels, size = shape.channels * shape.positions;
    first = share * Tile::ROWS;
  }

  __device__ void keep_weights() {
#pragma unroll
    for (int load = 0; load < Tile::LOADS; ++load) {
      Factors factors = {};
      if (KEEP_WEIGHTS && Tile::column(load) < size) factors = read_factors(load, 0.f, 1.f);
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c)
        weights[load][c] = factors.scale[c], biases[load][c] = factors.offset[c];
    }
  }

  __device__ void advance() { first += params.shares * Tile::ROWS; }
  __device__ bool more() const { return first < int(params.shape.batch); }

  // The sample of this thread; how many elements one has; its group among those of all samples.
  __device__ int sample() const { return first + Tile::row(); }
  __device__ int columns(int sample) const { return sample < int(params.shape.batch) ? size : 0; }
  __device__ int64_t unit(int sample) const {
    return int64_t(sample) * params.shape.groups + group;
  }

  // Opaque: what the loop does not change would be kept in registers through all of it.
  template <typename V>
  __device__ V* part(V* tensor, const GroupStrides& strides, int sample) const {
    return tensor + sample * strides.batch + opaque(first_channel) * strides.channel;
  }

  __device__ Factors read_factors(int load, float mean, float inverse) const {
    const int pack = opaque(int(threadIdx.x % Tile::ROW_THREADS)) + load * Tile::ROW_THREADS;
    const int channel = first_channel + channel_of_pack<CHANNELS>(params.shape, pack);
    return affine_of<ACTIVATION, T, CHANNELS, WEIGHT>(params.weight, params.bias, channel, mean,
                                                      inverse);
  }

  __device__ Factors factors(int load, float mean, float inverse) const {
    if constexpr (KEEP_WEIGHTS) {
      Factors factors;
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c)
        factors.set_scaled(c, mean, inverse, weights[load][c], biases[load][c]);
      return factors;
    } else {
      return read_factors(load, mean, inverse);
    }
  }
};
