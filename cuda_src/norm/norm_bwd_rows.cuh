// Gradients of norm_fwd. With n = (x - mean) * scale and g = dout * weight:
//   dx      = scale * (g - mean of g - n * mean of g * n) + dresidual    (RMS: no mean of g)
//   dweight = sum of dout * n over the rows, dbias = sum of dout
//
// x, dout and dresidual are read once. A block takes rows with equal steps between them and keeps
// its share of dweight and dbias in registers. The next STAGES rows are on their way to a ring in
// shared memory meanwhile. A thread copies just the packs that it will read itself, so the ring
// needs no barrier.
#pragma once
#include "../common/norm_params.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/warpgroup.cuh"
#include "row_tile.cuh"

// x, dout and dresidual of this thread's next rows.
template <class Tile, typename T, int STAGES>
struct RowRing {
  using Pack = Words<T, Tile::VECTOR>;
  static constexpr bool ASYNC = Tile::VECTOR > 1 && __CUDA_ARCH__ >= 800;
  static constexpr int STAGE_PACKS = 3 * Tile::LOADS * Tile::THREADS;

  Pack* packs;  // [STAGES, 3, LOADS, THREADS], from this thread's first one on
  int stage;

  __device__ Pack* row(int tensor) const {
    return packs + stage * STAGE_PACKS + tensor * Tile::LOADS * Tile::THREADS;
  }

  // A row, from this thread's first pack on, into the current place; zeros from `columns` on.
  __device__ void fill(int tensor, const T* from, int columns) const {
    Pack* to = row(tensor);
    if constexpr (ASYNC) {
#pragma unroll
      for (int load = 0; load < Tile::LOADS; ++load)
        cp_async_stream_16(smem_address(to) + load * Tile::THREADS * 16, from + load * Tile::PITCH,
                           load * Tile::PITCH < columns);
    } else {
      Pack values[Tile::LOADS] = {};
#pragma unroll
      for (int load = 0; load < Tile::LOADS; ++load)
        if (load * Tile::PITCH < columns)
          values[load] = load_words<Tile::VECTOR, true>(from + load * Tile::PITCH);
#pragma unroll
      for (int load = 0; load < Tile::LOADS; ++load) to[load * Tile::THREADS] = values[load];
    }
  }

  // Ends the filling of a place.
  __device__ void advance() {
    if constexpr (ASYNC) cp_async_commit();
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }

  // Until the current place is full.
  __device__ void wait() const {
    if constexpr (ASYNC) cp_async_wait<STAGES - 1>();
  }

  __device__ Pack read(int tensor, int load) const { return row(tensor)[load * Tile::THREADS]; }
};

// Over the threads of a row in all CLUSTER blocks that share it; every thread gets the same bits.
// `scratch` has a place for each warp of the cluster, and is another one for the next row, so that
// no warp overwrites what another still reads.
template <class Tile, int CLUSTER, class V>
__device__ __forceinline__ V row_sum(V value, V* scratch) {
  constexpr int WARPS = Tile::ROW_THREADS / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int mask = 1; mask < min(Tile::ROW_THREADS, 32); mask *= 2)
    value = value + shuffle_xor(value, mask);
  if constexpr (CLUSTER > 1) {
    static_assert(Tile::ROWS == 1 && CLUSTER * WARPS % 32 == 0, "whole warps of sums");
    if (lane < CLUSTER) *cluster_shared(&scratch[cluster_rank() * WARPS + warp], lane) = value;
    cluster_sync();
    value = scratch[lane];
#pragma unroll
    for (int i = 32; i < CLUSTER * WARPS; i += 32) value = value + scratch[i + lane];
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) value = value + shuffle_xor(value, mask);
  } else if constexpr (WARPS > 1) {
    static_assert(Tile::ROWS < 16, "a named barrier for each row");
    if (lane == 0) scratch[warp] = value;
    named_barrier_sync(1 + Tile::row(), Tile::ROW_THREADS);
    value = scratch[Tile::row() * WARPS + lane % WARPS];
#pragma unroll
    for (int mask = 1; mask < WARPS; mask *= 2) value = value + shuffle_xor(value, mask);
  }
  return value;
}

// The rows of this block; its share of dweight and dbias goes to `partials`. A block of a cluster
// has every CLUSTER-th piece of Tile::COLUMNS columns.
template <class Tile, typename T, typename WEIGHT, bool RMS, int CLUSTER, int STAGES>
__device__ __forceinline__ void norm_bwd_rows(const NormBwdParams& params, char* smem) {
  constexpr int LOADS = Tile::LOADS, VECTOR = Tile::VECTOR;
  // ---- which rows, and which columns from this thread's first pack on ----
  const NormShape& shape = params.shape;
  const int64_t split = blockIdx.x / CLUSTER, splits = gridDim.x / CLUSTER;
  const int piece = CLUSTER > 1 ? int(cluster_rank()) * Tile::COLUMNS : 0;
  const int begin = piece + Tile::column(0), columns = shape.columns - begin;
  const int64_t first = split * Tile::ROWS + Tile::row(), step = splits * Tile::ROWS;
  const int rounds = int((shape.rows - split * Tile::ROWS + step - 1) / step);
  int left = first < shape.rows ? int((shape.rows - first + step - 1) / step) : 0;  // to be copied
  __shared__ Sums scratch[2][CLUSTER * Tile::THREADS / 32];
  if constexpr (CLUSTER > 1) cluster_sync();  // all blocks run: their scratch may be written

  // ---- the first rows ----
  const T *x, *dout, *dresidual;
  T* dx;
  // Divides only if the rows have several axes; they are 32-bit numbers then.
  const auto each_axis = [&](int64_t row, auto visit) {
#pragma unroll 1
    for (int axis = shape.axes - 1; axis > 0; --axis) {
      const int size = int(shape.sizes[axis]), outer = int(row) / size;
      visit(axis, int64_t(int(row) - outer * size));
      row = outer;
    }
    visit(0, row);
  };
  const auto seek_inputs = [&](int64_t row) {
    x = static_cast<const T*>(params.x) + begin;
    dout = static_cast<const T*>(params.dout) + begin;
    dresidual = static_cast<const T*>(params.dresidual) + begin;
    each_axis(row, [&](int axis, int64_t index) {
      x += index * params.x_strides.axis[axis];
      dout += index * params.dout_strides.axis[axis];
      dresidual += index * params.dresidual_strides.axis[axis];
    });
  };
  const auto seek_dx = [&](int64_t row) {
    dx = static_cast<T*>(params.dx) + begin;
    each_axis(row, [&](int axis, int64_t index) { dx += index * params.dx_strides.axis[axis]; });
  };
  seek_inputs(first);
  seek_dx(first);
  const float* stats = params.stats + 2 * first;
  RowRing<Tile, T, STAGES> ring = {reinterpret_cast<Words<T, VECTOR>*>(smem) + threadIdx.x, 0};
  const auto fill = [&](int number) {  // with row first + number * step
    const int valid = left > 0 ? columns : 0;
    ring.fill(0, x, valid);
    ring.fill(1, dout, valid);
    if (params.dresidual) ring.fill(2, dresidual, valid);
    ring.advance();
    --left;
    if (shape.axes == 1) {
      x += step * params.x_strides.axis[0];
      dout += step * params.dout_strides.axis[0];
      dresidual += step * params.dresidual_strides.axis[0];
    } else {
      seek_inputs(first + (number + 1) * step);
    }
  };
#pragma unroll 1
  for (int i = 0; i < STAGES; ++i) fill(i);
  float next_mean = 0.f, next_scale = 0.f;
  const auto read_stats = [&](bool valid) {
    if (valid && !RMS) next_mean = stats[0];
    if (valid) next_scale = stats[1];
    stats += 2 * step;
  };
  read_stats(left + STAGES > 0);
  RowPacks<Tile, WEIGHT> weights = {};
  weights.template load<false>(static_cast<const WEIGHT*>(params.weight) + piece,
                               shape.columns - piece);

  float dweight[LOADS][VECTOR] = {}, dbias[LOADS][VECTOR] = {};
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const float mean = next_mean, scale = next_scale;
    const bool valid = left + STAGES > 0;
    read_stats(left + STAGES > 1);
    ring.wait();

    // ---- sums ----
    Words<T, VECTOR> x_packs[LOADS], dout_packs[LOADS];
    Sums sums = {0.f, 0.f};
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const auto x_pack = x_packs[load] = ring.read(0, load);
      const auto dout_pack = dout_packs[load] = ring.read(1, load);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float deviation = x_pack.at(i) - mean, gradient = dout_pack.at(i);
        const float g = gradient * weights.at(load, i);
        sums.first += g;
        sums.second += g * deviation;
        dweight[load][i] += gradient * scale * deviation;
        if (!RMS) dbias[load][i] += gradient;
      }
    }
    constexpr bool KEPT = LOADS * VECTOR <= 16;  // else they are read again
    weights.keep_packed();
    if constexpr (!KEPT) ring.stage = opaque(ring.stage);
    float offset = 0.f;  // scale * mean of g
    if constexpr (RMS) {
      sums.second = row_sum<Tile, CLUSTER>(sums.second, &scratch[round % 2][0].first);
    } else {
      sums = row_sum<Tile, CLUSTER>(sums, scratch[round % 2]);
      offset = scale * (sums.first * shape.inverse_columns);
    }
    const float slope = scale * (scale * (scale * (sums.second * shape.inverse_columns)));

    // ---- dx, another row into the place of this one ----
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const auto x_pack = KEPT ? x_packs[load] : ring.read(0, load);
      const auto dout_pack = KEPT ? dout_packs[load] : ring.read(1, load);
      Words<T, VECTOR> added = {};
      if (params.dresidual) added = ring.read(2, load);
      float result[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float g = dout_pack.at(i) * weights.at(load, i);
        const float deviation = x_pack.at(i) - mean;
        const float rest = RMS ? added.at(i) : added.at(i) - offset;
        result[i] = scale * g + (rest - deviation * slope);
      }
      const int column = load * Tile::PITCH;
      if (valid && column < columns) store_words<VECTOR>(dx + column, round_words<T>(result));
    }
    fill(round + STAGES);
    if (shape.axes == 1) {
      dx += step * params.dx_strides.axis[0];
    } else {
      seek_dx(first + (round + 1) * step);
    }
  }

  // ---- this block's share of dweight and dbias ----
  // Rows side by side in a block add up in the memory of the ring, one after the other.
  float* own = reinterpret_cast<float*>(smem);  // [ROWS, COLUMNS]
  const auto write_share = [&](const float (&values)[LOADS][VECTOR], int gradient) {
    __syncthreads();
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        own[Tile::row() * Tile::COLUMNS + Tile::column(load) + i] = values[load][i];
    }
    __syncthreads();
    float* partials = params.partials + (gradient * splits + split) * shape.columns + piece;
    const int end = min(shape.columns - piece, Tile::COLUMNS);
    for (int column = threadIdx.x; column < end; column += Tile::THREADS) {
      float sum = own[column];
#pragma unroll
      for (int i = 1; i < Tile::ROWS; ++i) sum += own[i * Tile::COLUMNS + column];
      partials[column] = sum;
    }
  };
  write_share(dweight, 0);
  if (params.dbias) write_share(dbias, 1);
}
