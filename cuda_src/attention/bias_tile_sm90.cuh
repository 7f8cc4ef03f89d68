// A 16-bit bias that the copy engine (TMA) brings to shared memory, a tile for each warpgroup and
// step, and its addition to the scores in wgmma accumulators.
#pragma once
#include "../common/ring.cuh"
#include "../common/smem_tile.cuh"
#include "../ptx/tma.cuh"
#include "bias.cuh"

// The bias of one head in its tensor map. An axis that the bias is broadcast on has length 1 there.
struct BiasMap {
  const TensorMap& map;
  int head;
  int batch;

  // Params is FlashFwdSm90Params or FlashBwdSm90Params.
  template <typename Params>
  __device__ BiasMap(const Params& params, int batch, int head)
      : map(params.bias_map),
        head(params.base.bias_strides.head ? head : 0),
        batch(params.base.bias_strides.batch ? batch : 0) {}

  // Loads the tile whose first element is (row, col); Tile has its size.
  template <class Tile>
  __device__ void load(uint32_t dst, RingBarriers<1>& barriers, const Ring<1>& ring, int row,
                       int col) const {
    barriers.wait_empty(ring);
    const uint32_t full = smem_address(&barriers.full[0]);
    mbarrier_arrive_expect(full, Tile::BYTES);
#pragma unroll
    for (int block = 0; block < Tile::NUM_BLOCKS; ++block) {
      tma_load(dst + block * Tile::BLOCK_BYTES, map, full, col + block * 64, row, head, batch);
    }
  }
};

// add_bias() of bias.cuh on two neighbouring scores. It costs less than half, because the limits
// are those of the 16-bit type: what is cut off is so at the largest number below them.
template <typename T>
__device__ __forceinline__ void add_bias_pair(float& first, float& second, uint32_t pair,
                                              float bias_scale) {
  if constexpr (T::IS_BFLOAT16) {
    // -BIAS_LIMIT * 2^104 is -inf, and so is what lies below; no other product is rounded.
    pair = min_bf16x2(mul_bf16x2(pair, 0x73807380u), 0x7f7f7f7fu);
    bias_scale *= 0x1p-104f;
    first += __uint_as_float(pair << 16) * bias_scale;
    second += __uint_as_float(pair & 0xffff0000u) * bias_scale;
  } else {
    pair = min_f16x2(pair, 0x7bff7bffu);
    first += to_float(half_t{static_cast<uint16_t>(pair)}) * bias_scale;
    second += to_float(half_t{static_cast<uint16_t>(pair >> 16)}) * bias_scale;
  }
}

// Adds to scores the 16 rows from `row` on of the tile at `smem`: an 8x8 matrix of ldmatrix lies in
// the lanes as the accumulators do. Returns what wait_for_loads() takes.
template <class Tile, typename T, int N>
__device__ __forceinline__ uint32_t add_bias_tile(float (&acc)[N][4], uint32_t smem, int row,
                                                  float bias_scale) {
  const int lane = threadIdx.x % 32;
  const uint32_t address = opaque(smem + Tile::offset(row + lane % 16, lane / 16));
  uint32_t loaded = 0;
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
    uint32_t pairs[4];
    ldmatrix_x4(pairs, Tile::advance(address, 0, 2 * k));
    loaded |= pairs[0];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float (&scores)[4] = acc[2 * k + i / 2];
      add_bias_pair<T>(scores[i % 2 * 2], scores[i % 2 * 2 + 1], pairs[i], bias_scale);
    }
  }
  return loaded;
}

// The same for transposed scores: adds the 16 columns of the tile from `col` on. The loads may
// still be under way when it returns.
template <class Tile, typename T, int N>
__device__ __forceinline__ void add_bias_tile_transposed(float (&acc)[N][4], uint32_t smem, int col,
                                                         float bias_scale) {
  const int lane = threadIdx.x % 32;
  const uint32_t address = smem + Tile::offset(lane / 16 * 8 + lane % 8, col / 8 + lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
    uint32_t pairs[4];
    ldmatrix_x4_trans(pairs, Tile::advance(address, k * 16, 0));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float (&scores)[4] = acc[2 * k + i / 2];
      add_bias_pair<T>(scores[i % 2 * 2], scores[i % 2 * 2 + 1], pairs[i], bias_scale);
    }
  }
}
