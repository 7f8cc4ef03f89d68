// LayerNorm (or RMSNorm) of x, or of h = x + residual, which it writes too:
//   out = (h - mean) / sqrt(variance + eps) * weight + bias
//   out = h / sqrt(mean of squares + eps) * weight              (RMS)
//
// Roles: ROW_THREADS threads of a block, or all threads of CLUSTER blocks, hold one row in their
// registers, so x and residual are read once, and h and out written once. h is normalised after it
// was rounded to its dtype: this is what the backward reads, and what separate operations compute.
//
// Shared memory holds partial sums only: `means` and `scratch`, one place a warp for each of the
// two sums that a row needs, and `exchange`, where the blocks of a cluster receive each other's
// sums. No place is written twice, so nothing is overwritten before it is read.
//
// It ends: all threads reach the barriers inside group_sum, as rows and columns outside of the
// tensor count as empty instead of returning. The blocks of a cluster run at the same time, and
// each sends its sums before it waits for those of the others.
//
// The next kernel may begin once the one before has ended, and not earlier: what it reads at once
// would take bandwidth from the one before.
//
// A block that takes several rows, with the next one on its way, was no faster: the other blocks of
// the multiprocessor keep the memory busy as well.
#pragma once
#include "../ptx/dependent_launch.cuh"
#include "cluster_exchange.cuh"
#include "row_tile.cuh"

// EARLY: weight and bias are loaded before the statistics are computed, where registers allow it.
template <class Tile, int CLUSTER, bool EARLY, bool RMS, typename T, typename WEIGHT>
__device__ __forceinline__ void norm_fwd_rows(const NormFwdParams& params) {
  // ---- which row, and which of its columns ----
  constexpr int LOADS = Tile::LOADS, VECTOR = Tile::VECTOR;
  const NormShape& shape = params.shape;
  const auto row = [] {
    if constexpr (Tile::ROWS > 1) {
      return int64_t(blockIdx.x) * Tile::ROWS + Tile::row();
    } else {
      return int(blockIdx.x / CLUSTER);  // an int takes fewer registers where rows have axes
    }
  }();
  const RowPieces<CLUSTER, VECTOR> pieces(shape.columns);
  const int begin = pieces.begin(pieces.rank());
  const int columns = row < shape.rows ? pieces.size(pieces.rank()) : 0;  // 0: joins in sums only
  int64_t x_place = begin, residual_place = begin;
  shape.each_axis<decltype(row)>(row, [&](int axis, int64_t index) {
    x_place += index * params.x_strides.axis[axis];
    residual_place += index * params.residual_strides.axis[axis];
  });
  // The place of the row in out and in h. It is computed twice, as keeping it would take registers.
  const auto out_place = [&] { return shape.at(params.out_strides, row) + begin; };
  __shared__ ClusterExchange<CLUSTER> exchange;
  if constexpr (CLUSTER > 1) exchange.init();

  // ---- read, add the residual ----
  RowPacks<Tile, WEIGHT> weights, biases;
  const WEIGHT* weight = static_cast<const WEIGHT*>(params.weight) + begin + Tile::column(0);
  const WEIGHT* bias = static_cast<const WEIGHT*>(params.bias) + begin + Tile::column(0);
  const auto read_affine = [&](int load) {  // no branches, so that loads can be issued early
    const bool inside = Tile::column(load) < columns;
    Words<WEIGHT, VECTOR> w = {}, b = {};
    if (inside) w = load_words<VECTOR>(weight + load * Tile::PITCH);
    if (inside && !RMS && params.bias) b = load_words<VECTOR>(bias + load * Tile::PITCH);
    weights.packs[load] = w, biases.packs[load] = b;
  };
  if constexpr (EARLY) {
#pragma unroll
    for (int load = 0; load < LOADS; ++load) read_affine(load);
  } else if (blockIdx.x < CLUSTER) {  // the first row's brings them to L2, for all rows
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      if (Tile::column(load) >= columns) break;
      prefetch_l2(weight + load * Tile::PITCH);
      if (!RMS && params.bias) prefetch_l2(bias + load * Tile::PITCH);
    }
  }
  wait_for_previous_kernel();
  launch_next_kernel();
  RowPacks<Tile, T> values, added;  // both are loaded before the first addition
  values.load(static_cast<const T*>(params.x) + x_place, columns);
  added.load(static_cast<const T*>(params.residual) + residual_place,
             params.residual ? columns : 0);
  if (params.residual) {
#pragma unroll
    for (int load = 0; load < LOADS; ++load) values.add(load, added.packs[load]);
    values.store(static_cast<T*>(params.residual_out) + out_place(), columns);
  }

  // ---- statistics ----
  __shared__ float means[MAX_WARPS];
  __shared__ Sums scratch[MAX_WARPS];
  float mean = 0.f, squares;
  if constexpr (RMS) {
    squares = group_sum<Tile::ROW_THREADS>(values.sum_of_squares(columns), means);
    if constexpr (CLUSTER > 1)
      squares = sum_of_neighbours<CLUSTER>(exchange.swap({0.f, squares}).second);
  } else {
    const float inverse = CLUSTER > 1 ? rcp_approx(float(columns)) : shape.inverse_columns;
    Moments moments = values.row_moments(columns, inverse, means, scratch);
    if constexpr (CLUSTER > 1) {
      const Sums sums = exchange.swap({moments.mean, moments.m2});
      const float count = float(pieces.size(threadIdx.x % CLUSTER));
      moments = sum_of_neighbours<CLUSTER>(Moments{count, sums.first, sums.second});
    }
    mean = moments.mean, squares = moments.m2;
  }
  const float scale = rsqrtf(squares * shape.inverse_columns + shape.eps);
  if (params.stats && columns && begin == 0 && threadIdx.x % Tile::ROW_THREADS == 0) {
    float* stats = params.stats + 2 * int64_t(row);
    stats[0] = mean, stats[1] = scale;
  }

  // ---- normalise ----
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    if constexpr (!EARLY) read_affine(load);
    float out[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float normal = (values.at(load, i) - mean) * scale;
      out[i] = normal * weights.at(load, i) + biases.at(load, i);
    }
    values.packs[load] = round_words<T>(out);
  }
  values.store(static_cast<T*>(params.out) + out_place(), columns);
}
