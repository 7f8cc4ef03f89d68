// Gradients of group_norm_fwd, channels first, for aligned groups that fit into shared memory. With
// n = (x - mean) * scale and dz = dout * activation'(n * weight + bias):
//   dweight = sum of dz * n over a channel, dbias = sum of dz
//   dx      = scale * (weight * dz - mean of weight * dz - n * mean of weight * dz * n)
//
// ROW_THREADS threads have one group of some samples, one after the other. Each warp has a run of
// the group, and the copy engine brings it that of the next sample meanwhile, in pieces, each into
// the place of the one that was just read: nobody but the warp itself waits for it. dz stays in
// registers, and so do x and the sums of each pack over the samples where a thread has few packs.
#include "group_shares.cuh"
#include "warp_ring.cuh"

// What x and dz are kept as until dx follows.
template <bool AS_FLOAT, typename T>
struct KeptAs {
  using Type = T;
};
template <typename T>
struct KeptAs<true, T> {
  using Type = float;
};

// Of x and dout; a piece of both may have one barrier.
template <class Tile, typename T>
struct InputsRing : RunRing<Tile, T, 2> {
  static constexpr bool KEPT = Tile::LOADS * Tile::VECTOR <= 16;  // x and dz, as floats

  // A warp that is alone with the row has some of it.
  __device__ bool has(int piece) const {
    return (Tile::ROW_THREADS == 32 && piece == 0) || RunRing<Tile, T, 2>::has(piece);
  }

  // As RunRing::fill, with tensors `first` to `last`.
  __device__ void fill(int first, int last, int piece, const T* const (&from)[2]) const {
    const int bytes = this->bytes(piece);
    this->expect(first, piece, (last + 1 - first) * bytes);
    for (int tensor = first; tensor <= last; ++tensor)
      this->load(tensor, 0, piece, from[tensor], bytes, this->barrier(first, piece));
  }
};

template <typename T, typename WEIGHT, Activation ACTIVATION, Layout LAYOUT, int ROW_THREADS,
          int LOADS, int VECTOR, int NUM_THREADS, int BLOCKS>
__global__ void __launch_bounds__(NUM_THREADS, BLOCKS)
    group_norm_bwd_pipelined(const __grid_constant__ GroupNormBwdParams params) {
  // ---- which part of which group, which run of that ----
  extern __shared__ __align__(16) char smem[];
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR, NUM_THREADS>;
  using Ring = InputsRing<Tile, T>;
  using Part = GroupPart<Tile, LAYOUT>;
  constexpr int CHANNELS = Part::CHANNELS, PITCH = Ring::PITCH, PIECE = Ring::PIECE;
  constexpr bool KEPT = Ring::KEPT;
  const GroupNormShape& shape = params.shape;
  const Part part(shape);
  const int share = int(blockIdx.x) / shape.groups;
  const int group = blockIdx.x - share * shape.groups, first_channel = group * shape.channels;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int runs = ceil_div(ceil_div(part.columns, PITCH), ROW_THREADS / 32);  // of each warp
  const int begin = warp % (ROW_THREADS / 32) * runs * PITCH;
  __shared__ uint64_t barriers[NUM_THREADS / 32][Ring::BARRIERS];
  const Ring ring = {{{smem_address(smem) + warp * Ring::BYTES, smem_address(barriers[warp])},
                      max(0, min(part.columns - begin, runs * PITCH))}};
  const int columns = ring.columns - lane * VECTOR;  // from this lane's first pack on

  // ---- the first sample ----
  const unsigned batch = shape.batch, step = params.shares * Tile::ROWS;
  unsigned sample = share * Tile::ROWS + warp / (ROW_THREADS / 32);
  const auto place = [&](const GroupStrides& strides) {
    return sample * strides.batch + first_channel * strides.channel + begin;
  };
  const T* inputs[] = {static_cast<const T*>(params.x) + place(params.x_strides),
                       static_cast<const T*>(params.dout) + place(params.dout_strides)};
  T* dx = static_cast<T*>(params.dx) + place(params.dx_strides);
  unsigned unit = sample * shape.groups + group;
  const auto read_stats = [&] { return reinterpret_cast<const float2*>(params.stats)[unit]; };
  float2 next_stats = {0.f, 0.f};
  if (sample < batch) next_stats = read_stats();
  if (elect_one()) {
    ring.init();
    for (int piece = 0; piece < Ring::PIECES; ++piece) {
      if (sample >= batch || !ring.has(piece)) break;
      if (!KEPT) ring.fill(0, 0, piece, inputs);
      ring.fill(KEPT ? 0 : 1, 1, piece, inputs);
    }
  }
  __syncwarp();

  // ---- weights, times what the activation takes, and the sums of each pack ----
  // In the order of the packs; the sums behind the ring, as long as that is in use.
  constexpr int ROW_SLOTS = Tile::COLUMNS / VECTOR * CHANNELS;
  constexpr float ARGUMENT = ARGUMENT_SCALE<ACTIVATION>;
  Sums* const slots = reinterpret_cast<Sums*>(smem + (KEPT ? 0 : 2 * LOADS * NUM_THREADS * 16));
  const int own = Tile::row() * ROW_SLOTS + (begin / VECTOR + lane) * CHANNELS;
  Sums* const own_totals = slots + own;
  float* const own_biases = reinterpret_cast<float*>(slots + Tile::ROWS * ROW_SLOTS) + own;
  constexpr int SLOT_PITCH = 32 * CHANNELS;
  float weights[LOADS][CHANNELS], biases[LOADS][CHANNELS];
  Sums totals[LOADS][CHANNELS];  // of scale * dz * (x - mean), dz
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int pack = begin / VECTOR + load * 32 + lane;
    const int channel = first_channel + (CHANNELS > 1 ? pack * CHANNELS : shape.packs.divide(pack));
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      totals[load][c] = {0.f, 0.f};
      weights[load][c] = biases[load][c] = 0.f;
      if (load * PITCH < columns) {
        weights[load][c] =
            ARGUMENT * to_float(static_cast<const WEIGHT*>(params.weight)[channel + c]);
        biases[load][c] = ARGUMENT * to_float(static_cast<const WEIGHT*>(params.bias)[channel + c]);
        if (!KEPT) own_totals[load * SLOT_PITCH + c] = {0.f, 0.f};
        if (!KEPT) own_biases[load * SLOT_PITCH + c] = biases[load][c];
      } else {
        st_shared_128(ring.address(0, load), {0, 0, 0, 0});
        st_shared_128(ring.address(1, load), {0, 0, 0, 0});
      }
    }
  }

  int parity = 0;
#pragma unroll 1
  for (; sample < batch; sample += step, parity ^= 1) {
    const float mean = next_stats.x, scale = next_stats.y;
    const bool more = sample + step < batch;
    inputs[0] += step * params.x_strides.batch;
    inputs[1] += step * params.dout_strides.batch;
    unit += step * shape.groups;
    if (more) next_stats = read_stats();

    // ---- dz, sums of each pack ----
    using Gradient = PackGradient<ACTIVATION, T, VECTOR, CHANNELS>;
    using Kept = typename KeptAs<KEPT, T>::Type;
    Words<Kept, VECTOR> values[LOADS], gradients[LOADS];
    Sums sums_of_group = {0.f, 0.f};  // of scale * weight * dz * (x - mean), scale * weight * dz
#pragma unroll
    for (int piece = 0; piece < Ring::PIECES; ++piece) {
      if (!ring.has(piece)) break;
      ring.wait(0, piece, parity);
      if (!KEPT) ring.wait(1, piece, parity);
      uint32_t loaded = 0;
#pragma unroll
      for (int load = piece * PIECE; load < (piece + 1) * PIECE; ++load) {
        const auto x_pack = ring.read(0, load), dout_pack = ring.read(1, load);
        loaded |= x_pack.words[0] | dout_pack.words[0];
        float scales[CHANNELS], bias[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
          scales[c] = scale * weights[load][c];
          bias[c] = KEPT ? biases[load][c] : 0.f;
          if (!KEPT && load * PITCH < columns) bias[c] = own_biases[load * SLOT_PITCH + c];
        }
        const Gradient pack(x_pack, dout_pack, mean, scales, bias);
        if (KEPT) values[load] = round_words<Kept>(pack.deviations);
        gradients[load] = round_words<Kept>(pack.dz);
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
          const Sums sums = pack.sums[c];
          Sums& total = KEPT ? totals[load][c] : own_totals[load * SLOT_PITCH + c];
          if (KEPT || load * PITCH < columns) total = total + Sums{scale * sums.first, sums.second};
          sums_of_group = sums_of_group + Sums{scales[c] * sums.first, scales[c] * sums.second};
        }
      }
      wait_for_loads(loaded);
      __syncwarp();
      if (more && elect_one()) ring.fill(KEPT ? 0 : 1, 1, piece, inputs);
    }

    // ---- means of the group ----
    __shared__ Sums of_warps[2][MAX_WARPS];
    sums_of_group = group_sum<ROW_THREADS>(sums_of_group, of_warps[parity]);
    const InputGradient constants =
        Gradient::input_gradient(mean, scale, shape.inverse_size, sums_of_group);
    const float centre = Gradient::CENTRED ? mean : 0.f;

    // ---- dx ----
#pragma unroll
    for (int piece = 0; piece < Ring::PIECES; ++piece) {
      if (!ring.has(piece)) break;
      uint32_t loaded = 0;
#pragma unroll
      for (int load = piece * PIECE; load < (piece + 1) * PIECE; ++load) {
        Words<T, VECTOR> x_pack = {};
        if (!KEPT) x_pack = ring.read(0, load);
        loaded |= x_pack.words[0];
        float result[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          const int c = i / (VECTOR / CHANNELS);
          const float deviation = KEPT ? values[load].at(i) : x_pack.at(i) - centre;
          result[i] =
              Gradient::dx(deviation, gradients[load].at(i), scale * weights[load][c], constants);
        }
        st_global_128(dx + (lane * VECTOR + load * PITCH), bits_of(round_words<T>(result)),
                      load * PITCH < columns);
      }
      if (KEPT) continue;
      wait_for_loads(loaded);
      __syncwarp();
      if (more && elect_one()) ring.fill(0, 0, piece, inputs);
    }
    dx += step * params.dx_strides.batch;
  }

  // ---- dweight and dbias ----
  __syncthreads();
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c)
      if (KEPT && load * PITCH < columns) own_totals[load * SLOT_PITCH + c] = totals[load][c];
  }
  __syncthreads();
  add_up_group<CHANNELS, Tile, WEIGHT>(params, slots, ROW_SLOTS);
}
