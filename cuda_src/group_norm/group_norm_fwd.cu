// GroupNorm and activation in NCHW of groups that fit into the registers of a block: one read, one
// write (affine.cuh has the formulas).
//
// ROW_THREADS threads have a group of one sample; where these are a warp or less, a block has one
// group of several samples at a time. With AHEAD it goes on to further samples: they are loaded
// while these are computed, and the weights are read once. No shared memory but for sums over
// warps.
//
// Microseconds on an H200 (bfloat16): 64x640x32x32 (SiLU, 32 groups) 44.9, in clusters of two
// blocks 65.9, in three steps 69.6; 4096x256x16 (Mish, 8 groups) with AHEAD 20.0, without 24.5.
#include "group_rows.cuh"

template <typename T, typename WEIGHT, Activation ACTIVATION, int CHANNELS, int ROW_THREADS,
          int LOADS, int VECTOR, int NUM_THREADS, int BLOCKS, bool AHEAD>
__global__ void __launch_bounds__(NUM_THREADS, BLOCKS)
    group_norm_fwd(const __grid_constant__ GroupNormFwdParams params) {
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR, NUM_THREADS>;
  using Packs = RowPacks<Tile, T>;
  const GroupNormShape& shape = params.shape;
  GroupRows<GroupNormFwdParams, Tile, T, WEIGHT, ACTIVATION, CHANNELS, AHEAD> rows(params);
  const auto load = [&] {
    Packs packs;
    packs.load(rows.part(static_cast<const T*>(params.x), params.x_strides, rows.sample()),
               rows.columns(rows.sample()));
    return packs;
  };
  Packs next = load();
  rows.keep_weights();

  while (true) {
    // ---- read, statistics ----
    const Packs own = next;
    const int sample = rows.sample(), columns = rows.columns(sample);
    rows.advance();
    if (AHEAD && rows.more()) next = load();
    RowPacks<Tile, typename Choose<AHEAD, float, T>::Type> values;
    Moments moments;
    if constexpr (AHEAD) {
      moments = moments_of_short_row(own, values, columns, shape.inverse_size);
    } else {
      values = own;
      __shared__ float means[MAX_WARPS];
      __shared__ Sums scratch[MAX_WARPS];
      moments = values.row_moments(columns, shape.inverse_size, means, scratch);
    }
    const float inverse = inverse_deviation(moments, shape);
    if (params.stats && columns && threadIdx.x % ROW_THREADS == 0)
      reinterpret_cast<float2*>(params.stats)[rows.unit(sample)] =
          make_float2(moments.mean, inverse);

    // ---- normalise, activate, write ----
    T* const out = opaque(rows.part(static_cast<T*>(params.out), params.out_strides, sample) +
                          Tile::column(0));
    const int rest = Tile::rest(columns);
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (load * Tile::PITCH >= rest) break;
      const auto factors = rows.factors(load, moments.mean, inverse);
      store_words<VECTOR>(out + load * Tile::PITCH, activated(values.packs[load], factors));
    }
    if (!AHEAD || !rows.more()) return;
  }
}
