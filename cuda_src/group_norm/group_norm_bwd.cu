// Gradients of GroupNorm in NCHW for groups that fit into the registers of a block (affine.cuh has
// the formulas): dout and x are read once, and dz takes the place of dout, rounded as separate
// operations would have it.
//
// ROW_THREADS threads have a group of one sample; a block has one group of several samples at a
// time where they need a warp or less. It goes on to further samples, with AHEAD loaded while these
// are computed. The sums of its packs over all of these, in shared memory, are its share of dweight
// and dbias (weight_shares.cuh).
//
// Microseconds on an H200, with AHEAD for without: 4096x256x16 29.8 for 34.7, 4096x1024x4 30.6
// for 37.4 (bfloat16, Mish, 8 groups).
#include "group_rows.cuh"
#include "weight_shares.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, int CHANNELS, int ROW_THREADS,
          int LOADS, int VECTOR, int NUM_THREADS, int BLOCKS, bool AHEAD>
__global__ void __launch_bounds__(NUM_THREADS, BLOCKS)
    group_norm_bwd(const __grid_constant__ GroupNormBwdParams params) {
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR, NUM_THREADS>;
  using Rows = GroupRows<GroupNormBwdParams, Tile, T, WEIGHT, ACTIVATION, CHANNELS, AHEAD>;
  using Factors = typename Rows::Factors;
  constexpr bool IN_REGISTERS = AHEAD && LOADS * VECTOR <= 16;  // sums, and dz as floats
  constexpr int ROW_SLOTS = ROW_THREADS * LOADS * CHANNELS;
  const GroupNormShape& shape = params.shape;
  Rows rows(params);
  struct Sample {
    RowPacks<Tile, T> x, dout;
    float2 stats;  // mean, 1 / deviation
  };
  const auto load = [&](Sample& own) {
    const int sample = rows.sample(), columns = rows.columns(sample);
    own.x.load(rows.part(static_cast<const T*>(params.x), params.x_strides, sample), columns);
    own.dout.load(rows.part(static_cast<const T*>(params.dout), params.dout_strides, sample),
                  columns);
    own.stats = make_float2(0.f, 0.f);
    if (columns) own.stats = reinterpret_cast<const float2*>(params.stats)[rows.unit(sample)];
  };
  Sample next;
  if (AHEAD) load(next);
  rows.keep_weights();

  // ---- sums of dz * n and dz of each channel of each pack ----
  __shared__ Sums slots[Tile::ROWS * ROW_SLOTS];
  Sums* const own_slots = slots + Tile::row() * ROW_SLOTS + threadIdx.x % ROW_THREADS * CHANNELS;
  const auto slot = [&](int load, int c) -> Sums& {
    return own_slots[load * (ROW_THREADS * CHANNELS) + c];
  };
  Sums totals[LOADS][CHANNELS];
#pragma unroll
  for (int i = 0; i < LOADS * CHANNELS; ++i)
    totals[i / CHANNELS][i % CHANNELS] = slot(i / CHANNELS, i % CHANNELS) = {0.f, 0.f};

  int parity = 0;
#pragma unroll 1
  for (; rows.more(); parity ^= 1) {
    // ---- read ----
    Sample own;
    if constexpr (AHEAD) {
      own = next;
    } else {
      load(own);
    }
    const int sample = rows.sample(), columns = rows.columns(sample);
    rows.advance();
    if (AHEAD && rows.more()) load(next);
    const float mean = own.stats.x, inverse = own.stats.y;

    // ---- dz, sums of each pack ----
    float dz[LOADS][VECTOR];
    Sums of_group = {0.f, 0.f};  // of weight * dz * n / deviation, weight * dz / deviation
    int rest = Tile::rest(columns);
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (load * Tile::PITCH >= rest) break;
      const Factors factors = rows.factors(load, mean, inverse);
      Sums sums[CHANNELS] = {};
      add_gradients(own.x.packs[load], own.dout.packs[load], factors, dz[load], sums);
      if (!IN_REGISTERS) own.dout.packs[load] = round_words<T>(dz[load]);
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) {
        const Sums of_channel = channel_sums<Factors::CENTRED>(sums[c], mean, inverse);
        Sums& total = IN_REGISTERS ? totals[load][c] : slot(load, c);
        total = total + of_channel;
        of_group = of_group +
                   Sums{factors.scale[c] * of_channel.first, factors.scale[c] * of_channel.second};
      }
    }

    // ---- means of the group ----
    __shared__ Sums of_warps[2][MAX_WARPS];
    of_group = group_sum<ROW_THREADS>(of_group, of_warps[parity]);
    const float share = Factors::INVERSE_ARGUMENT * shape.inverse_size;
    const auto gradient = InputGradient::of<Factors::CENTRED>(
        mean, inverse, {share * of_group.first, share * of_group.second});

    // ---- dx ----
    T* const dx =
        opaque(rows.part(static_cast<T*>(params.dx), params.out_strides, sample) + Tile::column(0));
    rest = Tile::rest(columns);
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (load * Tile::PITCH >= rest) break;
      const Factors factors = rows.factors(load, mean, inverse);
      float result[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float of_dz = IN_REGISTERS ? dz[load][i] : own.dout.at(load, i);
        result[i] = gradient.dx(own.x.at(load, i), of_dz, i / (VECTOR / CHANNELS), factors);
      }
      store_words<VECTOR>(dx + load * Tile::PITCH, round_words<T>(result));
    }
  }

  // ---- dweight and dbias ----
#pragma unroll
  for (int i = 0; i < LOADS * CHANNELS; ++i) {
    if (IN_REGISTERS) slot(i / CHANNELS, i % CHANNELS) = totals[i / CHANNELS][i % CHANNELS];
  }
  __syncthreads();
  add_up_group<CHANNELS, Tile, WEIGHT>(params, slots, ROW_SLOTS);
}
