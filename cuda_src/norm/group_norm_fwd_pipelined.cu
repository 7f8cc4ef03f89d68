// GroupNorm and activation of aligned groups that fit into the registers of a warp, channels first:
// one read, one write.
//   out = activation((x - mean) / sqrt(variance + eps) * weight + bias)
//
// A block has one group of some samples: ROW_THREADS threads have that of one sample after the
// other. The copy engine brings each warp those of the next PLACES turns meanwhile.
#include "warp_ring.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, Layout LAYOUT, int ROW_THREADS,
          int LOADS, int VECTOR, int PLACES, int NUM_THREADS, int BLOCKS>
__global__ void __launch_bounds__(NUM_THREADS, BLOCKS)
    group_norm_fwd_pipelined(const __grid_constant__ GroupNormFwdParams params) {
  // ---- which group, which samples ----
  extern __shared__ __align__(16) char smem[];
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR, NUM_THREADS>;
  using Ring = WarpRing<Tile, T, PLACES>;
  static_assert(ROW_THREADS <= 32 && Ring::PIECES == 1, "a warp knows all of its groups");
  using Part = GroupPart<Tile, LAYOUT>;
  constexpr int CHANNELS = Part::CHANNELS, PITCH = Ring::PITCH;
  const GroupNormShape& shape = params.shape;
  const Part part(shape);
  const int share = int(blockIdx.x) / shape.groups, group = blockIdx.x - share * shape.groups;
  const int first_channel = group * shape.channels;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  __shared__ uint64_t barriers[NUM_THREADS / 32][Ring::BARRIERS];
  const Ring ring = {smem_address(smem) + warp * Ring::BYTES, smem_address(barriers[warp])};
  const unsigned batch = shape.batch, step = params.shares * Tile::ROWS;
  unsigned sample = share * Tile::ROWS + warp * Ring::ROWS;  // of the warp's first row

  // ---- the first samples ----
  const T* next = static_cast<const T*>(params.x) + sample * params.x_strides.batch +
                  first_channel * params.x_strides.channel;
  const int bytes = part.columns * int(sizeof(T));
  const auto fill = [&](int place, unsigned first) {
    if (first >= batch) return;
    if (elect_one()) {
      const int rows = min(int(batch - first), Ring::ROWS);
      ring.expect(place, 0, rows * bytes);
#pragma unroll
      for (int row = 0; row < Ring::ROWS; ++row) {
        const T* from = next + row * params.x_strides.batch;
        if (row < rows) ring.load(place, row, 0, from, bytes, ring.barrier(place, 0));
      }
    }
    next += step * params.x_strides.batch;
  };
  if (elect_one()) ring.init();
  __syncwarp();
#pragma unroll 1
  for (int place = 0; place < PLACES; ++place) fill(place, sample + place * step);

  // ---- weights, times what the activation takes ----
  constexpr float ARGUMENT = ARGUMENT_SCALE<ACTIVATION>;
  const int columns = part.columns - lane % ROW_THREADS * VECTOR;  // from its first pack on
  float weights[LOADS][CHANNELS], biases[LOADS][CHANNELS];
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int channel = first_channel + part.channel(shape, load);
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      weights[load][c] = biases[load][c] = 0.f;
      if (load * PITCH >= columns) continue;
      weights[load][c] =
          ARGUMENT * to_float(static_cast<const WEIGHT*>(params.weight)[channel + c]);
      biases[load][c] = ARGUMENT * to_float(static_cast<const WEIGHT*>(params.bias)[channel + c]);
    }
  }

  const int row = lane / ROW_THREADS;
  const unsigned own = sample + row;
  T* out = static_cast<T*>(params.out) + own * params.out_strides.batch +
           first_channel * params.out_strides.channel + Tile::column(0);
  float2* stats = reinterpret_cast<float2*>(params.stats) + int64_t(own) * shape.groups + group;
  int place = 0, parity = 0;
#pragma unroll 1
  for (; sample < batch; sample += step) {
    // ---- mean ----
    ring.wait(place, 0, parity);
    float values[LOADS][VECTOR], sum = 0.f;
    uint32_t loaded = 0;
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const auto pack = ring.read(place, load);
      loaded |= pack.words[0];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) values[load][i] = pack.at(i);
      float share = values[load][0];
#pragma unroll
      for (int i = 1; i < VECTOR; ++i) share += values[load][i];
      sum += load * PITCH < columns ? share : 0.f;
    }
    wait_for_loads(loaded);
    __syncwarp();
    fill(place, sample + PLACES * step);
    if (++place == PLACES) place = 0, parity ^= 1;
    const float mean = shape.inverse_size * sum_of_neighbours<ROW_THREADS>(sum);

    // ---- deviations from it, variance ----
    float squares = 0.f;
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
#pragma unroll
      for (float& value : values[load]) value -= mean;
      float share = values[load][0] * values[load][0];
#pragma unroll
      for (int i = 1; i < VECTOR; ++i) share += values[load][i] * values[load][i];
      squares += load * PITCH < columns ? share : 0.f;
    }
    const float variance = shape.inverse_size * sum_of_neighbours<ROW_THREADS>(squares);
    const float scale = rsqrtf(variance + shape.eps);
    const bool has_sample = sample + row < batch;
    if (params.stats && has_sample && lane % ROW_THREADS == 0) *stats = make_float2(mean, scale);
    stats += step * shape.groups;

    // ---- normalise, activate, write ----
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      float result[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const int c = i / (VECTOR / CHANNELS);
        const float u = values[load][i] * (scale * weights[load][c]) + biases[load][c];
        result[i] = activate_scaled<ACTIVATION>(u);
      }
      st_global_128(out + load * PITCH, bits_of(round_words<T>(result)),
                    has_sample && load * PITCH < columns);
    }
    out += step * params.out_strides.batch;
  }
}
