// The keys and values of a warp in a decode step (flash_decode_block.cuh) whose cache has 8 bits.
//
// They are made float16, which has every number of 8 bits, in registers on their way to the tensor
// cores. The scale of a key multiplies its row of scores, and that of a value its row of weights,
// in float32. Both operands that are rounded, queries and weights, are brought near the largest
// float16 before by powers of two, so no scale and no bfloat16 leaves its range: the error of an
// 8-bit cache is that of its own numbers.
#pragma once
#include "../common/warp.cuh"
#include "flash_decode_keys.cuh"
#include "narrow.cuh"

// Powers of two as the exponents of floats, kept where the factor and its inverse are normal.
constexpr int LEAST_EXPONENT = 15;

// 2^floor(log2(|x|)); that of infinity and NaN is 255.
__device__ __forceinline__ int exponent_of(float x) {
  return max(int(__float_as_uint(x) >> 23 & 0xff), LEAST_EXPONENT);
}

// Numbers of at most this exponent are below 2^15 after they have been multiplied by to_range().
// from_range() is its inverse.
__device__ __forceinline__ float to_range(int exponent) {
  return __uint_as_float((2 * 127 + 14 - exponent) << 23);
}
__device__ __forceinline__ float from_range(int exponent) {
  return __uint_as_float((exponent - 14) << 23);
}

// The power of two that brings the scales of the values so far into range. Outputs are sums of
// weights times it; `scale` is that of a value, another in each lane.
template <int KIND>
struct ValueRange {
  int exponent = LEAST_EXPONENT;

  // Makes room for the scales of a chunk. Returns the factor for the outputs so far.
  __device__ __forceinline__ float include(float scale) {
    const int before = exponent;
    int found = exponent_of(scale);
    if (__any_sync(0xffffffffu, found > exponent)) {
      for (int mask = 1; mask < 32; mask *= 2)
        found = max(found, __shfl_xor_sync(0xffffffffu, found, mask));
      exponent = max(exponent, found);
    }
    return from_range(before) * to_range(exponent);
  }

  __device__ float out_factor() const { return from_range(exponent); }
};

template <>
struct ValueRange<SAME> {
  __device__ static constexpr float out_factor() { return 1.f; }
};

// As KeyTiles, of a cache of 8 bits, whose rows are at multiples of 16 bytes. Lane i has the scales
// of key number i.
template <int KIND, int TILES, int BLOCKS, int ARCH>
struct NarrowTiles : RowTiles<uint8_t, TILES, BLOCKS, 16, BLOCKS == 2 ? 16 : 8> {
  static_assert(TILES == 2, "a lane has the scales of one key");
  // 16 bytes a lane are full lines of 128; with twice as many columns sm_120 would spill.
  static constexpr int V_WIDTH = BLOCKS == 2 ? 16 : 8;
  using Base = RowTiles<uint8_t, TILES, BLOCKS, 16, V_WIDTH>;
  using Base::k;
  using Base::v;
  float k_scale, v_scale;

  // As KeyTiles::scores(), times the scales of the keys and the `units` of the queries.
  template <int QUERY_TILES>
  __device__ void scores(float (&s)[QUERY_TILES][TILES][4], uint32_t q, const float* units) const {
    const QuadLane lane;
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
      keep_order();
      uint4 query[QUERY_TILES];
#pragma unroll
      for (int n = 0; n < QUERY_TILES; ++n)
        query[n] = ld_shared_128(q + ((n * 2 * BLOCKS + i) * 32 + threadIdx.x % 32) * 16);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const auto &x = k[tile][0][i / 2], &y = k[tile][1][i / 2];
        uint32_t low[4], high[4];
        widen<KIND, ARCH>(x.words[i % 2 * 2], low[0], low[2]);
        widen<KIND, ARCH>(y.words[i % 2 * 2], low[1], low[3]);
        widen<KIND, ARCH>(x.words[i % 2 * 2 + 1], high[0], high[2]);
        widen<KIND, ARCH>(y.words[i % 2 * 2 + 1], high[1], high[3]);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n) {
          mma_m16n8k16<half_t, ARCH>(s[n][tile], low, query[n].x, query[n].y);
          mma_m16n8k16<half_t, ARCH>(s[n][tile], high, query[n].z, query[n].w);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      const float scale = __shfl_sync(0xffffffffu, k_scale, i * 8 + lane.g);
#pragma unroll
      for (int n = 0; n < QUERY_TILES; ++n) {
#pragma unroll
        for (int query = 0; query < 2; ++query)
          s[n][i / 2][i % 2 * 2 + query] *= units[n * 8 + lane.c * 2 + query] * scale;
      }
    }
  }

  // Weights times the scales of their values, in range.
  __device__ void scale_weights(float (&s)[TILES][4], ValueRange<KIND> range) const {
    const float scaled = v_scale * to_range(range.exponent);
    const QuadLane lane;
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      const float scale = __shfl_sync(0xffffffffu, scaled, i * 8 + lane.g);
      s[i / 2][i % 2 * 2] *= scale;
      s[i / 2][i % 2 * 2 + 1] *= scale;
    }
  }

  // As KeyTiles::add_weighted().
  template <int QUERY_TILES>
  __device__ void add_weighted(float (&o)[QUERY_TILES][BLOCKS][4][4],
                               const uint32_t (&p)[QUERY_TILES][TILES][2]) const {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
#pragma unroll
        for (int t = 0; t < 4; t += 2) {
          // The bytes of two keys for columns 2t to 2t + 3, column by column.
          uint32_t a[2][4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int load = j * 8 / V_WIDTH, word = j * 8 % V_WIDTH / 4 + t / 2;
            const uint32_t x = v[tile][half][0][load].words[word];
            const uint32_t y = v[tile][half][1][load].words[word];
            const int at = half * 2;
            widen<KIND, ARCH>(__byte_perm(x, y, 0x5140), a[0][at], a[0][at + 1]);
            widen<KIND, ARCH>(__byte_perm(x, y, 0x7362), a[1][at], a[1][at + 1]);
          }
#pragma unroll
          for (int n = 0; n < QUERY_TILES; ++n) {
            mma_m16n8k16<half_t, ARCH>(o[n][j][t], a[0], p[n][tile][0], p[n][tile][1]);
            mma_m16n8k16<half_t, ARCH>(o[n][j][t + 1], a[1], p[n][tile][0], p[n][tile][1]);
          }
        }
      }
    }
  }
};

// Eight columns of a query, of which a warp has all, as float16 in range; `unit` undoes that. Lanes
// behind the last column bring zeros.
template <int ARCH>
__device__ __forceinline__ uint4 to_range_f16(const float (&values)[8], float& unit) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(values[i]));
  const int exponent = exponent_of(warp_max(largest));
  const float factor = to_range(exponent);
  unit = from_range(exponent);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = pack<half_t, ARCH>(values[2 * i] * factor, values[2 * i + 1] * factor);
  return make_uint4(words[0], words[1], words[2], words[3]);
}
