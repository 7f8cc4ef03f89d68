// Products of small M: up to 32 rows of x with many rows of weights, each of which is read once.
//
// A block has 8 warps, all with the same role, and x in shared memory. It works on tiles of up to
// 16 pairs of rows of weights, cut into slices of 128 bytes of the depth. Every warp has slices of
// its own, which pass through a ring in shared memory that belongs to this warp alone
// (small_m_ring.cuh): no barrier of the block holds them up, and all but the one that is multiplied
// are on their way, from the beginning, before x is there, and while the results of a tile are
// finished. A warp needs no more of x than the same slices: they come with the weights, unless
// there is a norm, which wants whole rows.
//
// The rows of weights are A of the tensor cores, x is B (common/small_m_mma.cuh). Where there are
// no tensor cores for the type, lanes multiply what they have, and the four of a row add up.
//
// Shared memory (SmallMTile): the rings of all warps; the sums of the warps, which a block adds up;
// mean and 1 / deviation of each row, for the norm; the rows of x.
//
// The walk of a warp over its tiles is finite, and it waits for its own copies only; the block
// synchronises where all of its warps do. A slice is replaced by the warp that has read it, after
// __syncwarp(); sums are replaced after the __syncthreads() that follows their reading.
#pragma once
#include "small_m_sums.cuh"

// ---- products ----

// Multiplies x with the tiles of a walk, whose weights come out of the ring: done(tile, sums) gets
// what this warp has found. Asks for as much as it takes.
template <class Tile, class Weights, class Done>
__device__ __forceinline__ void multiply_tiles(SliceRing<Tile>& ring, Slices<Tile, Weights>& slices,
                                               const SmemRows& x, const Walk& walk, Done done) {
  SmallMSums<Tile, Tile::MMA> sums(x);
#pragma unroll 1
  for (int tile = 0; tile < walk.tiles; ++tile) {
    sums.clear();
#pragma unroll 1
    for (int k = walk.begin; k < walk.depth; k += walk.stride) {
      const uint32_t stage = ring.wait();
      sums.take_slice(k * sizeof(typename Tile::T));
      sums.multiply(stage);
      __syncwarp();  // everyone has read what the next slice replaces
      ring.fill(slices);
    }
    done(tile, sums);
  }
}

// The walk of each warp: all of them share the depth of every tile.
template <class Tile>
__device__ __forceinline__ Walk shared_walk(const EvenTiles& tiles, int depth) {
  return {tiles.count, depth, int(threadIdx.x) / 32 * Tile::SLICE, SMALL_M_WARPS * Tile::SLICE};
}

// The products of such walks: finish(pair, n, first, second) gets the two sums of a pair with row n
// of x.
template <class Tile, class Weights, class Finish>
__device__ __forceinline__ void small_m_products(SliceRing<Tile>& ring,
                                                 Slices<Tile, Weights>& slices, const SmemRows& x,
                                                 const EvenTiles& tiles, int depth,
                                                 float* sums_of_warps, Finish finish) {
  constexpr int SUM_ROWS = Tile::SUM_ROWS, WARP_SUMS = SUM_ROWS * SUMS_PITCH;
  float* own = sums_of_warps + threadIdx.x / 32 * WARP_SUMS;
  const auto done = [&](int tile, const SmallMSums<Tile, Tile::MMA>& sums) {
    const int n = threadIdx.x / TILE_PAIRS, row = threadIdx.x % TILE_PAIRS;
    const int pair = tiles.pair(tile, row);
#pragma unroll
    for (int begin = 0; begin < Tile::ROWS; begin += SUM_ROWS) {
      __syncthreads();  // the sums before have been read
      sums.each(begin, [&](int n, int half, int row, float sum) {
        own[n * SUMS_PITCH + half * TILE_PAIRS + row] = sum;
      });
      __syncthreads();
      if (n >= SUM_ROWS || begin + n >= x.rows || pair < 0) continue;
      float first = 0.f, second = 0.f;
      const float* from = sums_of_warps + n * SUMS_PITCH + row;
#pragma unroll
      for (int w = 0; w < SMALL_M_WARPS; ++w) {
        first += from[w * WARP_SUMS];
        second += from[w * WARP_SUMS + TILE_PAIRS];
      }
      finish(pair, begin + n, first, second);
    }
  };
  multiply_tiles<Tile>(ring, slices, x, shared_walk<Tile>(tiles, depth), done);
}

// ---- x ----

// Asks for x, all of it if there is a norm, and for the first weights.
template <class Tile, class Weights>
__device__ __forceinline__ void ask_for_rows(SliceRing<Tile>& ring, Slices<Tile, Weights>& slices,
                                             const LinearParams& params) {
  using T = typename Tile::T;
  if (params.norm_weight) {
    slices.x.all();
    copies_commit<Tile::ARCH>();
  }
#pragma unroll 1  // little code is fetched sooner
  for (int i = 0; i < Tile::NUM_STAGES; ++i) ring.fill(slices);
  if (params.norm_weight)
    prefetch_norm<T>(params.norm, params.norm_weight, params.norm_bias, params.depth);
}

// x is there and normalised, if there is a norm; the weights may still be on their way.
template <class Tile>
__device__ __forceinline__ void wait_for_rows(const SmemRows& x, const LinearParams& params,
                                              float* stats) {
  if (!params.norm_weight) return;
  if constexpr (Tile::ARCH >= 80) cp_async_wait<Tile::NUM_STAGES>();
  __syncthreads();
  normalise_rows<Tile>(x, params.depth, params.norm, params.norm_weight, params.norm_bias, stats);
  __syncthreads();
}
