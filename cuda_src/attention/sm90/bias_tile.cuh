// A 16-bit bias that TMA loads to shared memory, one tile for each warpgroup and step, and its
// addition to the scores in wgmma accumulators.
#pragma once
#include "../../common/ring.cuh"
#include "../../common/smem_tile.cuh"
#include "../../ptx/permute.cuh"
#include "../../ptx/tma.cuh"
#include "../bias.cuh"

// The bias of one head in its tensor map. An axis that the bias is broadcast on has length 1 in the
// map.
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

  // Loads the tile whose first element is (row, col). Tile is the SmemTile at `dst`.
  template <class Tile, int STAGES>
  __device__ void load(uint32_t dst, RingBarriers<STAGES>& barriers, const Ring<STAGES>& ring,
                       int row, int col) const {
    barriers.wait_empty(ring);
    const uint32_t full = smem_address(&barriers.full[ring.stage]);
    mbarrier_arrive_expect(full, Tile::BYTES);
#pragma unroll
    for (int block = 0; block < Tile::NUM_BLOCKS; ++block) {
      tma_load(dst + block * Tile::BLOCK_BYTES, map, full, col + block * 64, row, head, batch);
    }
  }
};

// The bits of a key mask beside a bias by TMA, for a tile of 8 * N keys from `key` on, a multiple
// of 8 * OCTETS. Other kinds of bias need none of this.
template <BiasKind KIND, int N>
struct SeenKeys {
  static constexpr bool HAS_MASK = is_by_tma(KIND) && has_key_mask(KIND);
  static constexpr int OCTETS = N % 4 == 0 ? 4 : 2;  // of keys in a word
  uint32_t words[HAS_MASK ? N / OCTETS : 1];

  __device__ SeenKeys(const void* record, int batch, int key) {
    if constexpr (HAS_MASK) {
      const KeyBits bits(record, batch);
#pragma unroll
      for (int i = 0; i < N / OCTETS; ++i) {
        words[i] = OCTETS == 4 ? bits.words[uint32_t(key) / 32 + i] : bits.sixteen(key + i * 16);
      }
    }
  }

  // Replaces the numbers of unseen keys by -inf. `pair` is that of this lane's two keys in octet n
  // of the tile. Their bits are shifted to where the signs of bytes are, and repeated from there.
  template <typename T>
  __device__ uint32_t apply(uint32_t pair, int n) const {
    if constexpr (!HAS_MASK) return pair;
    const int own = threadIdx.x % 4 * 2;  // the place of the two in every eight
    const uint32_t word = words[HAS_MASK ? n / OCTETS : 0];
    const uint32_t bytes = 0xcc88 + n % OCTETS * 0x1111;
    const uint32_t seen = repeat_signs(word << (7 - own), word << (6 - own), bytes);
    return (pair & seen) | ((T::IS_BFLOAT16 ? 0xff80ff80u : 0xfc00fc00u) & ~seen);
  }
};

// add_bias() of bias.cuh for two neighbouring scores, at less than half of its cost: 16-bit
// instructions apply the limits to both. A bias above BIAS_LIMIT is cut off at the largest finite
// 16-bit number below it.
template <typename T>
__device__ __forceinline__ void add_bias_pair(float& first, float& second, uint32_t pair,
                                              float bias_scale) {
  if constexpr (T::IS_BFLOAT16) {
    // Times 2^104, a bias of -BIAS_LIMIT or less is -inf. No other product is rounded.
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

// Adds the 16 rows from `row` on of the tile at `smem` to scores, with -inf for keys that are not
// seen. ldmatrix distributes an 8x8 matrix over the lanes in the way in which they hold the
// accumulators. Returns the OR of a word of each load, for wait_for_loads().
template <class Tile, typename T, int N, class Seen>
__device__ __forceinline__ uint32_t add_bias_tile(float (&acc)[N][4], uint32_t smem, int row,
                                                  float bias_scale, const Seen& seen) {
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
      add_bias_pair<T>(scores[i % 2 * 2], scores[i % 2 * 2 + 1],
                       seen.template apply<T>(pairs[i], 2 * k + i / 2), bias_scale);
    }
  }
  return loaded;
}

// add_bias_tile() for transposed scores: adds the 16 columns from `col` on of the tile. Its loads
// may still be in flight when it returns.
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
