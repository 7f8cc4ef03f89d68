// Products of a few rows of x with many rows of weights, each of which is read once: what
// linear_few and mlp_few have in common.
//
// A block of 8 warps has x in shared memory. It works on tiles of up to 16 pairs of rows of
// weights, cut into slices of 128 bytes of the depth. Every warp has slices of its own, which pass
// through a ring in shared memory that belongs to this warp alone: no barrier of the block holds
// them up, and all but the one that is multiplied are on their way, from the beginning, before x is
// there, and while the results of a tile are finished.
//
// The rows of weights are A of the tensor cores, x is B; the order of the depth in a sum is free,
// so 16 bytes of a lane are as good as the fragment that the instruction names. Where there are no
// tensor cores for the type, lanes multiply what they have, and the four of a row add up.
#pragma once
#include "few_sums.cuh"

// ---- products ----

// Multiplies x with the tiles of a walk, whose weights come out of the ring: done(tile, sums) gets
// what this warp has found. Asks for as much as it takes, of this walk or of the next one.
template <class Tile, class Weights, class Done>
__device__ __forceinline__ void multiply_tiles(WeightRing<Tile>& ring,
                                               Slices<Tile, Weights>& slices, const SmemRows& x,
                                               const Walk& walk, Done done) {
  FewSums<Tile, Tile::MMA> sums(x);
#pragma unroll 1
  for (int tile = 0; tile < walk.tiles; ++tile) {
    sums.clear();
#pragma unroll 1
    for (int k = walk.begin; k < walk.depth; k += walk.stride) {
      sums.take_slice(k * sizeof(typename Tile::T));
      sums.multiply(ring.wait());
      __syncwarp();  // everyone has read what the next slice replaces
      ring.fill(slices);
    }
    done(tile, sums);
  }
}

// The walk of each warp where all of them share the depth of every tile.
template <class Tile>
__device__ __forceinline__ Walk shared_walk(const EvenTiles& tiles, int depth) {
  return {tiles.count, depth, int(threadIdx.x) / 32 * Tile::SLICE, FEW_WARPS * Tile::SLICE};
}

// The products of such walks: finish(pair, n, first, second) gets the two sums of a pair with row n
// of x.
template <class Tile, class Weights, class Finish>
__device__ __forceinline__ void few_products(WeightRing<Tile>& ring, Slices<Tile, Weights>& slices,
                                             const SmemRows& x, const EvenTiles& tiles, int depth,
                                             float* sums_of_warps, Finish finish) {
  const int warp = threadIdx.x / 32;
  const auto done = [&](int tile, FewSums<Tile, Tile::MMA>& sums) {
    __syncthreads();  // the sums of the tile before have been read
    sums.each([&](int n, int half, int row, float sum) {
      sums_of_warps[(warp * Tile::ROWS + n) * SUMS_PITCH + half * TILE_PAIRS + row] = sum;
    });
    __syncthreads();
    const int n = threadIdx.x / TILE_PAIRS, row = threadIdx.x % TILE_PAIRS;
    const int pair = tiles.pair(tile, row);
    if (n >= x.rows || pair < 0) return;
    float first = 0.f, second = 0.f;
    const float* from = sums_of_warps + n * SUMS_PITCH + row;
#pragma unroll
    for (int w = 0; w < FEW_WARPS; ++w) {
      first += from[w * Tile::ROWS * SUMS_PITCH];
      second += from[w * Tile::ROWS * SUMS_PITCH + TILE_PAIRS];
    }
    finish(pair, n, first, second);
  };
  multiply_tiles<Tile>(ring, slices, x, shared_walk<Tile>(tiles, depth), done);
}

// ---- x ----

// Asks for x, and for the first weights.
template <class Tile, class Weights, class Params>
__device__ __forceinline__ void ask_for_rows(WeightRing<Tile>& ring, Slices<Tile, Weights>& slices,
                                             const SmemRows& x, const Params& params) {
  using T = typename Tile::T;
  copy_rows<Tile>(x, static_cast<const T*>(params.x), params.x_stride, params.depth);
#pragma unroll 1  // little code is fetched sooner
  for (int i = 0; i < Tile::NUM_STAGES; ++i) ring.fill(slices);
  if (params.norm_weight)
    prefetch_norm<T>(params.norm, params.norm_weight, params.norm_bias, params.depth);
}

// x is there, normalised if there is a norm; the weights may still be on their way.
template <class Tile, class Params>
__device__ __forceinline__ void wait_for_rows(const SmemRows& x, const Params& params,
                                              float* stats) {
  if constexpr (Tile::ARCH >= 80) cp_async_wait<Tile::NUM_STAGES>();
  __syncthreads();
  if (!params.norm_weight) return;
  normalise_rows<Tile>(x, params.depth, params.norm, params.norm_weight, params.norm_bias, stats);
  __syncthreads();
}
