// Products of a few rows of x with many rows of weights, each of which is read once: what
// linear_few and mlp_few have in common.
//
// A block of 16 warps has x in shared memory. It takes tiles of 16 rows of weights, whose depth the
// warps share in steps of 64 bytes, one step a warp, in turns. In a step lane = 4 g + c reads 16
// bytes of each of the rows g and g + 8 of the tile, straight into registers, several steps ahead:
// all lanes together keep up to 64 KB on their way, which is what hides the latency of the
// memory. The rows are A of the tensor cores, x is B; the order of the depth in a sum is free, so
// the 16 bytes of a lane are as good as the fragment that the instruction names. Where there are no
// tensor cores for the type, lanes multiply what they have, and the four of a row add up.
#pragma once
#include "../ptx/mma.cuh"
#include "few_rows.cuh"

// ---- weights on their way ----

// Rows g and g + 8 of a tile.
template <typename T>
struct WeightRows {
  const T* first;
  const T* second;
};

// ---- sums of a warp: 16 rows of weights times the rows of x ----

template <class Tile, bool MMA>
struct FewSums;

// Lane 4 g + c has, for n = 8 i + 2 c + j, sums[i][j] of rows (g, n) and sums[i][2 + j] of
// (g + 8, n).
template <class Tile>
struct FewSums<Tile, true> {
  using T = typename Tile::T;
  static constexpr int BLOCKS = Tile::ROWS / 8;
  float sums[BLOCKS][4];
  const char* x[BLOCKS];  // row 8 i + g; a row that is not there repeats the last one

  __device__ FewSums(const SmemRows& rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
      x[i] = rows.at(min(8 * i + lane / 4, rows.rows - 1), lane % 4 * 16);
    clear();
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
  }

  // A step that begins at byte `byte` of x.
  __device__ __forceinline__ void multiply(const uint4& first, const uint4& second, int byte) {
    const uint32_t low[4] = {first.x, second.x, first.y, second.y};
    const uint32_t high[4] = {first.z, second.z, first.w, second.w};
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      const uint4 b = *reinterpret_cast<const uint4*>(x[i] + byte);
      mma_m16n8k16<T, Tile::ARCH>(sums[i], low, b.x, b.y);
      mma_m16n8k16<T, Tile::ARCH>(sums[i], high, b.z, b.w);
    }
  }

  // store(n, row of the tile, sum) for each.
  template <class Store>
  __device__ __forceinline__ void each(Store store) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) store(8 * i + 2 * c + j % 2, g + j / 2 * 8, sums[i][j]);
    }
  }
};

// Every lane has its share of all sums of rows g and g + 8.
template <class Tile>
struct FewSums<Tile, false> {
  using T = typename Tile::T;
  float sums[2][Tile::ROWS];
  SmemRows rows;

  __device__ FewSums(const SmemRows& rows) : rows(rows) { clear(); }

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < Tile::ROWS; ++n) sums[0][n] = sums[1][n] = 0.f;
  }

  __device__ __forceinline__ void multiply(const uint4& first, const uint4& second, int byte) {
    const char* x = rows.at(0, byte + threadIdx.x % 4 * 16);
#pragma unroll
    for (int n = 0; n < Tile::ROWS; ++n) {
      if (n >= rows.rows) break;
      const uint4 b = *reinterpret_cast<const uint4*>(x + n * rows.pitch);
#pragma unroll
      for (int i = 0; i < Tile::LANE; ++i) {
        const float value = at(b, i);
        sums[0][n] += at(first, i) * value;
        sums[1][n] += at(second, i) * value;
      }
    }
  }

  template <class Store>
  __device__ __forceinline__ void each(Store store) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < Tile::ROWS; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = sums[half][n];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (n % 4 == c) store(n, g + half * 8, sum);
      }
    }
  }

 private:
  __device__ static float at(const uint4& pack, int i) {
    return to_float(reinterpret_cast<const T*>(&pack)[i]);
  }
};

// ---- tiles on their way ----

// The turns of a warp at the tiles begin, begin + stride, ... below end, in the order in which it
// takes them: `turns` at each.
struct Turns {
  int tile;
  int turn;
  int stride;
  int turns;

  __device__ void next() {
    if (++turn == turns) turn = 0, tile += stride;
  }
  __device__ bool is_last() const { return turn + 1 == turns; }
};

// Multiplies x with tiles of weights, of which this warp takes the steps at k, k + k_stride, ... of
// the depth. Tile::STEPS steps are on their way while as many are multiplied, whichever tiles they
// belong to. weights(tile, g) are rows of weights, stage() makes x ready while the first of them
// are on their way, and done(tile, sums) gets what this warp has found.
template <class Tile, class Weights, class Stage, class Done>
__device__ __forceinline__ void stream_weights(const SmemRows& x, int depth, int k, int k_stride,
                                               int begin, int end, int stride, Weights weights,
                                               Stage stage, Done done) {
  using T = typename Tile::T;
  const int lane = threadIdx.x % 32;
  Turns now = {begin, 0, stride, (depth + k_stride - 1) / k_stride};
  Turns ahead = now;
  uint4 first[Tile::STEPS], second[Tile::STEPS];
  WeightRows<T> rows = {};
  const auto load = [&](int i) {
    if (ahead.tile >= end) return;
    if (ahead.turn == 0) rows = weights(ahead.tile, lane / 4);
    const int k_lane = k + ahead.turn * k_stride + lane % 4 * Tile::LANE;
    first[i] = load_lane<Tile>(rows.first, k_lane, depth);
    second[i] = load_lane<Tile>(rows.second, k_lane, depth);
    ahead.next();
  };
#pragma unroll
  for (int i = 0; i < Tile::STEPS; ++i) load(i);
  stage();
  FewSums<Tile, Tile::MMA> sums(x);
#pragma unroll 1
  while (now.tile < end) {
#pragma unroll
    for (int i = 0; i < Tile::STEPS; ++i) {
      if (now.tile >= end) break;
      const uint4 a = first[i], b = second[i];
      load(i);
      const int k_now = k + now.turn * k_stride;
      if (k_now < depth) sums.multiply(a, b, k_now * sizeof(T));
      if (now.is_last()) {
        done(now.tile, sums);
        sums.clear();
      }
      now.next();
    }
  }
}

// The same by all warps of a block, who share the depth of each tile. finish(tile, pair, n, first,
// second) gets the two sums of a pair of a tile, its rows pair and pair + 8, with row n of x.
// stage() ends with a barrier of the block.
template <class Tile, class Weights, class Stage, class Finish>
__device__ __forceinline__ void few_products(const SmemRows& x, float* sums_of_warps, int depth,
                                             int begin, int end, int stride, Weights weights,
                                             Stage stage, Finish finish) {
  const int warp = threadIdx.x / 32;
  const auto done = [&](int tile, FewSums<Tile, Tile::MMA>& sums) {
    __syncthreads();  // the sums of the tile before have been read
    sums.each([&](int n, int row, float sum) {
      sums_of_warps[(warp * Tile::ROWS + n) * SUMS_PITCH + row] = sum;
    });
    __syncthreads();
    const int n = threadIdx.x / TILE_PAIRS, pair = threadIdx.x % TILE_PAIRS;
    if (n >= x.rows) return;
    float first = 0.f, second = 0.f;
    const float* from = sums_of_warps + n * SUMS_PITCH + pair;
#pragma unroll
    for (int w = 0; w < FEW_WARPS; ++w) {
      first += from[w * Tile::ROWS * SUMS_PITCH];
      second += from[w * Tile::ROWS * SUMS_PITCH + TILE_PAIRS];
    }
    finish(tile, pair, n, first, second);
  };
  stream_weights<Tile>(x, depth, warp * Tile::STEP, FEW_WARPS * Tile::STEP, begin, end, stride,
                       weights, stage, done);
}
