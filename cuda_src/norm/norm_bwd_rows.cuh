// The gradients of norm_fwd. With n = (x - mean) * scale and g = dout * weight:
//   dx      = scale * (g - mean of g - n * mean of g * n) + dresidual    (RMS: no mean of g)
//   dweight = sum of dout * n over the rows, dbias = sum of dout
//
// x, dout and dresidual are read once. A block (or a cluster of blocks, each with a piece of the
// columns) takes rows with equal steps between them, and keeps its partial sums of dweight and
// dbias in registers until the end. Rows of less than a block lie side by side in it.
//
// Shared memory: a ring of STAGES rows of x, dout and dresidual, filled while earlier rows are
// computed. Each thread copies just the packs that it will read itself, so the ring needs no
// barrier, and a place is filled again by the thread that has just read it. Beside the ring there
// are two places for the sums of each warp, used alternately: a warp that writes the sums of row
// i + 2 has passed the barrier of row i + 1, which the others reached after reading those of row i.
// At the end the ring becomes the place where rows side by side add up their partial sums.
//
// It ends: all threads of a block make the same number of rounds (rows behind the last one are
// empty), so all reach each barrier. The blocks of a cluster make the same rounds, run at the same
// time, and send the sums of a row before they wait for those of the others.
#pragma once
#include "../ptx/cp_async.cuh"
#include "norm_bwd_sums.cuh"
#include "params.cuh"
#include "row_tile.cuh"

// The ring of the next rows: x, dout and dresidual, of which each thread uses its own packs.
template <class Tile, typename T, int STAGES>
struct RowRing {
  using Pack = Words<T, Tile::VECTOR>;
  static constexpr bool ASYNC = Tile::VECTOR > 1 && __CUDA_ARCH__ >= 800;
  static constexpr int STAGE_PACKS = 3 * Tile::LOADS * Tile::THREADS;

  Pack* packs;  // [STAGES, 3, LOADS, THREADS], from this thread's first one on
  int stage;

  __device__ Pack* row(int place, int tensor) const {
    return packs + place * STAGE_PACKS + tensor * Tile::LOADS * Tile::THREADS;
  }

  // Starts to copy a row, from this thread's first pack on, into the current place. Packs behind
  // `columns` become zeros.
  __device__ void fill(int tensor, const T* from, int columns) const {
    Pack* to = row(stage, tensor);
    if constexpr (ASYNC) {
#pragma unroll
      for (int load = 0; load < Tile::LOADS; ++load)
        cp_async_16(smem_address(to) + load * Tile::THREADS * 16, from + load * Tile::PITCH,
                    load * Tile::PITCH < columns);
    } else {
      Pack values[Tile::LOADS] = {};
#pragma unroll
      for (int load = 0; load < Tile::LOADS; ++load)
        if (load * Tile::PITCH < columns)
          values[load] = load_words<Tile::VECTOR>(from + load * Tile::PITCH);
#pragma unroll
      for (int load = 0; load < Tile::LOADS; ++load) to[load * Tile::THREADS] = values[load];
    }
  }

  __device__ int next() const { return stage + 1 < STAGES ? stage + 1 : 0; }

  // Closes the current place, whose copies were all started, and goes on to the next.
  __device__ void advance() {
    if constexpr (ASYNC) cp_async_commit();
    stage = next();
  }

  // Waits until the current place and AHEAD more are full.
  template <int AHEAD>
  __device__ void wait() const {
    if constexpr (ASYNC) cp_async_wait<STAGES - 1 - AHEAD>();
  }

  __device__ Pack read(int place, int tensor, int load) const {
    return row(place, tensor)[load * Tile::THREADS];
  }
};

// Computes dx of the rows of this block, or of its pieces of them. The block's partial sums of
// dweight and dbias go to `partials`.
template <class Tile, typename T, typename WEIGHT, bool RMS, int CLUSTER, int STAGES>
__device__ __forceinline__ void norm_bwd_rows(const NormBwdParams& params, char* smem) {
  constexpr int LOADS = Tile::LOADS, VECTOR = Tile::VECTOR;
  // ---- which rows, and which columns from this thread's first pack on ----
  const NormShape& shape = params.shape;
  const int64_t split = blockIdx.x / CLUSTER, splits = gridDim.x / CLUSTER;
  const RowPieces<CLUSTER, VECTOR> pieces(shape.columns);
  const int piece = pieces.begin(pieces.rank()), piece_columns = pieces.size(pieces.rank());
  const int begin = piece + Tile::column(0), columns = piece_columns - Tile::column(0);
  // Neighbouring rows go to different blocks, so that all have the same number of them, give or
  // take one.
  const int64_t first = Tile::row() * splits + split, step = splits * Tile::ROWS;
  const int count = first < shape.rows ? int((shape.rows - first + step - 1) / step) : 0;
  const int rounds = int((shape.rows - split + step - 1) / step);  // of the block

  // ---- the first rows ----
  const T *x, *dout, *dresidual;
  T* dx;
  const auto seek_inputs = [&](int64_t row) {
    x = static_cast<const T*>(params.x) + begin;
    dout = static_cast<const T*>(params.dout) + begin;
    dresidual = static_cast<const T*>(params.dresidual) + begin;
    shape.each_axis<int>(row, [&](int axis, int64_t index) {  // MAX_ROWS in plan.py
      x += index * params.x_strides.axis[axis];
      dout += index * params.dout_strides.axis[axis];
      dresidual += index * params.dresidual_strides.axis[axis];
    });
  };
  const auto seek_dx = [&](int64_t row) {
    dx = static_cast<T*>(params.dx) + begin;
    shape.each_axis<int>(
        row, [&](int axis, int64_t index) { dx += index * params.dx_strides.axis[axis]; });
  };
  seek_inputs(first);
  seek_dx(first);
  const float* stats = params.stats + 2 * first;
  RowRing<Tile, T, STAGES> ring = {reinterpret_cast<Words<T, VECTOR>*>(smem) + threadIdx.x, 0};
  const auto fill = [&](int number) {  // the current place, with row first + number * step
    const int valid = number < count ? columns : 0;
    ring.fill(0, x, valid);
    ring.fill(1, dout, valid);
    if (params.dresidual) ring.fill(2, dresidual, valid);
    ring.advance();
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
  RowStats summed = {0.f, 0.f}, next = summed;  // of the row that add_up took last; of the next
  const auto read_stats = [&](int number) {
    if (number < count && !RMS) next.mean = stats[0];
    if (number < count) next.scale = stats[1];
    stats += 2 * step;
  };
  read_stats(0);
  RowPacks<Tile, WEIGHT> weights = {};
  weights.load(static_cast<const WEIGHT*>(params.weight) + piece, piece_columns);

  // ---- the two steps of a row: its sums, and its dx ----
  constexpr int AHEAD = CLUSTER > 1 ? 1 : 0;             // rows that add_up is ahead of write_dx
  constexpr bool KEPT = !AHEAD && LOADS * VECTOR <= 16;  // else the ring is read again for dx
  float dweight[LOADS][VECTOR] = {}, dbias[LOADS][VECTOR] = {};
  Words<T, VECTOR> x_packs[LOADS], dout_packs[LOADS];
  const auto add_up = [&](int number, int place) {  // gives the sums over the lanes of a warp
    summed = next;
    read_stats(number + 1);
    ring.template wait<AHEAD>();
    Sums sums = {0.f, 0.f};
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const auto x_pack = x_packs[load] = ring.read(place, 0, load);
      const auto dout_pack = dout_packs[load] = ring.read(place, 1, load);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float deviation = x_pack.at(i) - summed.mean, gradient = dout_pack.at(i);
        const float g = gradient * weights.at(load, i);
        if (!RMS) sums.first += g;
        sums.second += g * deviation;
        dweight[load][i] += gradient * summed.scale * deviation;
        if (!RMS) dbias[load][i] += gradient;
      }
    }
    weights.keep_packed();
    if constexpr (!KEPT) ring.stage = opaque(ring.stage);
    return lane_sum<RMS, Tile::ROW_THREADS>(sums);
  };
  // Writes dx of a row, and fills the row's place in the ring with a later one.
  const auto write_dx = [&](int number, const RowStats& row, const Sums& sums) {
    const float mean = row.mean, scale = row.scale;
    const float offset = RMS ? 0.f : scale * (sums.first * shape.inverse_columns);
    const float slope = scale * (scale * (scale * (sums.second * shape.inverse_columns)));
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const auto x_pack = KEPT ? x_packs[load] : ring.read(ring.stage, 0, load);
      const auto dout_pack = KEPT ? dout_packs[load] : ring.read(ring.stage, 1, load);
      Words<T, VECTOR> added = {};
      if (params.dresidual) added = ring.read(ring.stage, 2, load);
      float result[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float g = dout_pack.at(i) * weights.at(load, i);
        const float deviation = x_pack.at(i) - mean;
        const float rest = RMS ? added.at(i) : added.at(i) - offset;
        result[i] = scale * g + (rest - deviation * slope);
      }
      const int column = load * Tile::PITCH;
      if (number < count && column < columns)
        store_words<VECTOR>(dx + column, round_words<T>(result));
    }
    fill(number + STAGES);
    if (shape.axes == 1) {
      dx += step * params.dx_strides.axis[0];
    } else {
      seek_dx(first + (number + 1) * step);
    }
  };

  // ---- all rows ----
  constexpr int WARPS = Tile::THREADS / 32;
  if constexpr (CLUSTER > 1) {
    static_assert(Tile::ROWS == 1, "a cluster shares one row");
    __shared__ ClusterSums<RMS, CLUSTER, WARPS> exchange;
    exchange.init();
    Sums own = add_up(0, 0);
    exchange.send(0, own);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const RowStats row = summed;
      const bool more = round + 1 < rounds;
      if (more) own = add_up(round + 1, ring.next());
      const Sums sums = exchange.receive(round);
      if (more) exchange.send(round + 1, own);
      write_dx(round, row, sums);
    }
  } else {
    __shared__ Sums scratch[2][WARPS];
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const Sums own = add_up(round, ring.stage);
      write_dx(round, summed, row_sum<Tile, RMS>(own, scratch[round % 2]));
    }
  }

  // ---- this block's partial sums of dweight and dbias ----
  // Rows side by side in a block add up in the memory of the ring, in a fixed order.
  ring.template wait<STAGES - 1>();
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
    for (int column = threadIdx.x; column < piece_columns; column += Tile::THREADS) {
      float sum = own[column];
#pragma unroll
      for (int i = 1; i < Tile::ROWS; ++i) sum += own[i * Tile::COLUMNS + column];
      partials[column] = sum;
    }
  };
  write_share(dweight, 0);
  if (params.dbias) write_share(dbias, 1);
}
