// Who holds what of a row: ROW_THREADS neighbouring threads have LOADS packs of VECTOR columns each
// in registers. Rows of more than COLUMNS columns pass through in pieces of that size.
#pragma once
#include "../common/convert.cuh"
#include "../common/group_sum.cuh"
#include "../common/norm_params.cuh"
#include "../common/pack.cuh"
#include "../ptx/opaque.cuh"

// Short rows share a block; threads of a row that is longer than a warp are the block.
constexpr int MIN_BLOCK_THREADS = 128;

__host__ __device__ constexpr int block_threads(int row_threads) {
  return row_threads > 32 ? row_threads : MIN_BLOCK_THREADS;
}

// Blocks of a multiprocessor that leave each thread so many registers.
__host__ __device__ constexpr int min_blocks(int row_threads, int registers) {
  return 65536 / registers / block_threads(row_threads);
}

template <int ROW_THREADS_, int LOADS_, int VECTOR_>
struct RowTile {
  static constexpr int ROW_THREADS = ROW_THREADS_;
  static constexpr int LOADS = LOADS_;
  static constexpr int VECTOR = VECTOR_;
  static constexpr int COLUMNS = ROW_THREADS * LOADS * VECTOR;
  static constexpr int ROWS = block_threads(ROW_THREADS) / ROW_THREADS;  // of a block

  // The number of this thread's row in the block.
  __device__ static int row() { return threadIdx.x / ROW_THREADS; }

  // The first column of a load; a load lies inside the row or outside of it as a whole.
  __device__ static int column(int load) {
    return (load * ROW_THREADS + int(threadIdx.x % ROW_THREADS)) * VECTOR;
  }
};

template <class Tile, typename T>
struct RowPacks {
  Pack<T, Tile::VECTOR> packs[Tile::LOADS];

  __device__ float at(int load, int i) const { return to_float(packs[load].values[i]); }

  // The first `columns` columns of a row.
  __device__ void load(const T* row, int columns) {
#pragma unroll
    for (int i = 0; i < Tile::LOADS; ++i) {
      const int column = Tile::column(i);
      if (column < columns) packs[i] = load_pack<Tile::VECTOR>(row + column);
    }
  }

  __device__ void store(T* row, int columns) const {
#pragma unroll
    for (int i = 0; i < Tile::LOADS; ++i) {
      const int column = Tile::column(i);
      if (column < columns) store_pack<Tile::VECTOR>(row + column, packs[i]);
    }
  }

  // Lets the floats made of the packs go: there is room for the packs only. They are made again.
  __device__ void keep_packed() {
    constexpr int WORDS = Tile::LOADS * Tile::VECTOR * sizeof(T) / 4;
    if constexpr (sizeof(T) * Tile::VECTOR % 4 == 0) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        uint32_t& word = reinterpret_cast<uint32_t*>(packs)[i];
        word = opaque(word);
      }
    }
  }

  // Mean and deviations of what lies inside of `columns` columns.
  __device__ Moments moments(int columns) {
    float sum = 0.f;
    int count = 0;
#pragma unroll
    for (int load = 0; load < Tile::LOADS; ++load) {
      if (Tile::column(load) >= columns) continue;
      count += Tile::VECTOR;
#pragma unroll
      for (int i = 0; i < Tile::VECTOR; ++i) sum += at(load, i);
    }
    if (Tile::LOADS * Tile::VECTOR > 32) keep_packed();
    const float share = count ? rcp_approx(float(count)) : 0.f;
    Moments result = {float(count), sum * share, 0.f};
    float rest = 0.f;  // what rounding left of the deviations' sum
#pragma unroll
    for (int load = 0; load < Tile::LOADS; ++load) {
      if (Tile::column(load) >= columns) continue;
#pragma unroll
      for (int i = 0; i < Tile::VECTOR; ++i) {
        const float deviation = at(load, i) - result.mean;
        rest += deviation;
        result.m2 += deviation * deviation;
      }
    }
    result.mean += rest * share;
    result.m2 -= rest * (rest * share);
    if (Tile::LOADS * Tile::VECTOR > 32) keep_packed();
    return result;
  }

  __device__ float sum_of_squares(int columns) const {
    float sum = 0.f;
#pragma unroll
    for (int load = 0; load < Tile::LOADS; ++load) {
      if (Tile::column(load) >= columns) continue;
#pragma unroll
      for (int i = 0; i < Tile::VECTOR; ++i) sum += at(load, i) * at(load, i);
    }
    return sum;
  }
};
