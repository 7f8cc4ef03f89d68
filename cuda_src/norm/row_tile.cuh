// How a row is spread over threads: ROW_THREADS neighbouring threads hold LOADS packs of VECTOR
// columns each in registers. Pack number `load` of neighbouring threads is contiguous in the row.
#pragma once
#include "../common/group_sum.cuh"
#include "../common/words.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/opaque.cuh"
#include "params.cuh"

// Rows of up to a warp share a block; a longer row has a block of its own.
constexpr int MIN_BLOCK_THREADS = 128;

__host__ __device__ constexpr int block_threads(int row_threads) {
  return row_threads > 32 ? row_threads : MIN_BLOCK_THREADS;
}

template <int ROW_THREADS_, int LOADS_, int VECTOR_, int THREADS_ = block_threads(ROW_THREADS_)>
struct RowTile {
  static constexpr int ROW_THREADS = ROW_THREADS_;
  static constexpr int LOADS = LOADS_;
  static constexpr int VECTOR = VECTOR_;
  static constexpr int PITCH = ROW_THREADS * VECTOR;  // columns between two loads of a thread
  static constexpr int COLUMNS = LOADS * PITCH;
  static constexpr int THREADS = THREADS_;  // of a block
  static constexpr int ROWS = THREADS / ROW_THREADS;

  // The number of this thread's row in the block.
  __device__ static int row() { return threadIdx.x / ROW_THREADS; }

  // The number of columns from this thread's first one to the end of the row. A load is inside the
  // row if load * PITCH is less; comparing each time is cheaper than keeping the results.
  __device__ static int rest(int columns) { return opaque(columns - column(0)); }

  // The first column of a load; a load lies inside the row or outside of it as a whole.
  __device__ static int column(int load) {
    return (load * ROW_THREADS + int(threadIdx.x % ROW_THREADS)) * VECTOR;
  }
};

// How the columns of a row are divided among the blocks of a cluster: in equal pieces of whole
// 128-byte lines.
template <int CLUSTER, int VECTOR>
struct RowPieces {
  int columns;
  int share;  // of each block but the last, which has at least one column as the rows are long

  __device__ explicit RowPieces(int columns) : columns(columns), share(columns) {
    constexpr int LINE = 8 * VECTOR;
    if (CLUSTER > 1) share = ceil_div(columns, CLUSTER * LINE) * LINE;
  }

  __device__ static int rank() { return CLUSTER > 1 ? int(cluster_rank()) : 0; }

  __device__ int begin(int rank) const { return rank * share; }

  __device__ int size(int rank) const { return min(columns - begin(rank), share); }
};

// The packs of a row that this thread holds.
template <class Tile, typename T>
struct RowPacks {
  Words<T, Tile::VECTOR> packs[Tile::LOADS];

  __device__ float at(int load, int i) const { return packs[load].at(i); }

  // Loads the first `columns` columns of a row. The loads go through L1, though nobody may read
  // them again: bypassing it takes an H200 3 to 5 % longer.
  __device__ void load(const T* row, int columns) {
    const T* first = opaque(row + Tile::column(0));  // one address, and constant offsets from it
    const int rest = Tile::rest(columns);
#pragma unroll
    for (int i = 0; i < Tile::LOADS; ++i) {
      if (i * Tile::PITCH < rest) packs[i] = load_words<Tile::VECTOR>(first + i * Tile::PITCH);
    }
  }

  __device__ void store(T* row, int columns) const {
    T* first = opaque(row + Tile::column(0));
    const int rest = Tile::rest(columns);
#pragma unroll
    for (int i = 0; i < Tile::LOADS; ++i) {
      if (i * Tile::PITCH < rest) store_words<Tile::VECTOR>(first + i * Tile::PITCH, packs[i]);
    }
  }

  // Adds another pack; the sums are rounded to T.
  __device__ void add(int load, const Words<T, Tile::VECTOR>& other) {
    float sums[Tile::VECTOR];
#pragma unroll
    for (int i = 0; i < Tile::VECTOR; ++i) sums[i] = at(load, i) + other.at(i);
    packs[load] = round_words<T>(sums);
  }

  // Makes the compiler drop the floats that it converted the packs to, where registers have room
  // for the packs only. Later uses convert again.
  __device__ void keep_packed() {
    if constexpr (Tile::LOADS * Tile::VECTOR > 16) {
#pragma unroll
      for (auto& pack : packs) {
#pragma unroll
        for (uint32_t& word : pack.words) word = opaque(word);
      }
    }
  }

  // The sum of this thread's values inside of `columns` columns.
  __device__ float sum(int columns) {
    float sum = 0.f;
    const int rest = Tile::rest(columns);
#pragma unroll
    for (int load = 0; load < Tile::LOADS; ++load) {
      if (load * Tile::PITCH >= rest) break;
#pragma unroll
      for (int i = 0; i < Tile::VECTOR; ++i) sum += at(load, i);
    }
    keep_packed();
    return sum;
  }

  // The sums of the deviations from `mean` (which may be an approximation) and of their squares.
  __device__ Sums deviations(int columns, float mean) {
    Sums sums = {0.f, 0.f};
    const int rest = Tile::rest(columns);
#pragma unroll
    for (int load = 0; load < Tile::LOADS; ++load) {
      if (load * Tile::PITCH >= rest) break;
#pragma unroll
      for (int i = 0; i < Tile::VECTOR; ++i) {
        const float deviation = at(load, i) - mean;
        sums.first += deviation;
        sums.second += deviation * deviation;
      }
    }
    keep_packed();
    return sums;
  }

  __device__ float sum_of_squares(int columns) {
    float sum = 0.f;
#pragma unroll
    for (int load = 0; load < Tile::LOADS; ++load) {
      if (Tile::column(load) >= columns) continue;
#pragma unroll
      for (int i = 0; i < Tile::VECTOR; ++i) sum += at(load, i) * at(load, i);
    }
    keep_packed();
    return sum;
  }

  // The moments of this thread's values.
  __device__ Moments moments(int columns) {
    int count = 0;
#pragma unroll
    for (int load = 0; load < Tile::LOADS; ++load)
      count += Tile::column(load) < columns ? Tile::VECTOR : 0;
    const float share = count ? rcp_approx(float(count)) : 0.f;
    const float mean = sum(columns) * share;
    return moments_of(float(count), share, mean, deviations(columns, mean));
  }

  // The moments of the whole row, which is in registers; `inverse` is 1 / columns. Two sums over
  // the row are cheaper than merging the moments of the threads. The deviations are taken from the
  // mean of the first loads only, of m values. If it is d away from the mean of the row, the
  // squares of the deviations add up to at least m * d * d, so subtracting columns * d * d cancels
  // no more than a factor of LOADS, which is a few bits.
  __device__ Moments row_moments(int columns, float inverse, float (&first)[MAX_WARPS],
                                 Sums (&second)[MAX_WARPS]) {
    float sum = 0.f;
    if (Tile::column(0) < columns) {
#pragma unroll
      for (int i = 0; i < Tile::VECTOR; ++i) sum += at(0, i);
    }
    constexpr int FIRST = Tile::ROW_THREADS * Tile::VECTOR;
    const float share = columns < FIRST ? inverse : 1.f / FIRST;
    const float mean = group_sum<Tile::ROW_THREADS>(sum, first) * share;
    const Sums rest = group_sum<Tile::ROW_THREADS>(deviations(columns, mean), second);
    return moments_of(float(columns), inverse, mean, rest);
  }
};
