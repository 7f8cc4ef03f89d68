// The sums of a warp of small_m.cuh: a tile of weights times the rows of x. x is in shared memory,
// as all tiles are multiplied with the same rows; block/row_dot.cuh, whose vectors change with
// every product, has them in registers.
#pragma once
#include "small_m_ring.cuh"

constexpr int HALF_BYTES = STAGE_BYTES / 2;

template <class Tile, bool MMA>
struct SmallMSums;

// Lane 4 g + c has, for n = 8 i + 2 c + j, sums[half][i][j] of rows (g, n) and sums[half][i][2 + j]
// of (g + 8, n).
template <class Tile>
struct SmallMSums<Tile, true> {
  using T = typename Tile::T;
  static constexpr int BLOCKS = Tile::ROWS / 8;
  float sums[2][BLOCKS][4];
  uint4 slice[BLOCKS][2];
  const char* x[BLOCKS];  // row 8 i + g; a row that is not there repeats the last one

  __device__ SmallMSums(const SmemRows& rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
      x[i] = rows.at(min(8 * i + lane / 4, rows.rows - 1), lane % 4 * 16);
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i / BLOCKS][i % BLOCKS][j] = 0.f;
    }
  }

  // The slice of x that begins at this byte is the one that is multiplied next.
  __device__ __forceinline__ void take_slice(int byte) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      slice[i][0] = *reinterpret_cast<const uint4*>(x[i] + byte);
      slice[i][1] = *reinterpret_cast<const uint4*>(x[i] + byte + 64);
    }
  }

  __device__ __forceinline__ void multiply(uint32_t stage) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    uint4 first[2][2], second[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t from = stage + stage_byte(g, c + i % 2 * 4) + i / 2 * HALF_BYTES;
      first[i / 2][i % 2] = ld_shared_128(from);
      second[i / 2][i % 2] = ld_shared_128(from + HALF_BYTES / 2);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2 * BLOCKS; ++i) {  // sums that do not wait for each other
        const int half = i % 2;
        mma_step<T, Tile::ARCH>(sums[half][i / 2], first[half][j / 2], second[half][j / 2],
                                slice[i / 2][j / 2], j % 2);
      }
    }
  }

  // store(n - first, half, row of the half, sum) for each of SUM_ROWS rows n of x, from `first` on.
  template <class Store>
  __device__ __forceinline__ void each(int first, Store store) const {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < Tile::SUM_ROWS / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          store(8 * i + 2 * c + j % 2, half, g + j / 2 * 8, sums[half][first / 8 + i][j]);
      }
    }
  }
};

// Every lane has its share of all sums of rows g and g + 8 of a half.
template <class Tile>
struct SmallMSums<Tile, false> {
  using T = typename Tile::T;
  float sums[2][2][Tile::ROWS];
  SmemRows rows;
  const char* slice;

  __device__ SmallMSums(const SmemRows& rows) : rows(rows) {}

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < Tile::ROWS; ++n) sums[i / 2][i % 2][n] = 0.f;
    }
  }

  __device__ __forceinline__ void take_slice(int byte) {
    slice = rows.at(0, byte + threadIdx.x % 4 * 16);
  }

  // A sum of its own for each slice: one chain of float32 additions would lose a digit.
  __device__ __forceinline__ void multiply(uint32_t stage) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 weights[2][2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t from = stage + stage_byte(g, c + 4 * j) + half * HALF_BYTES;
        weights[0][j] = ld_shared_128(from);
        weights[1][j] = ld_shared_128(from + HALF_BYTES / 2);
      }
#pragma unroll
      for (int n = 0; n < Tile::ROWS; ++n) {
        if (n >= rows.rows) break;
        float first = 0.f, second = 0.f;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint4 b = *reinterpret_cast<const uint4*>(slice + n * rows.pitch + 64 * j);
#pragma unroll
          for (int i = 0; i < Tile::LANE; ++i) {
            first += at(weights[0][j], i) * at(b, i);
            second += at(weights[1][j], i) * at(b, i);
          }
        }
        sums[half][0][n] += first;
        sums[half][1][n] += second;
      }
    }
  }

  template <class Store>
  __device__ __forceinline__ void each(int first, Store store) const {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < Tile::SUM_ROWS; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float sum = quad_sum(sums[i / 2][i % 2][first + n]);
        if (n % 4 == c) store(n, i / 2, g + i % 2 * 8, sum);
      }
    }
  }

 private:
  __device__ static float at(const uint4& pack, int i) {
    return to_float(reinterpret_cast<const T*>(&pack)[i]);
  }
};
