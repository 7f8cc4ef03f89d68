// Products of the rows of a tile in shared memory with up to eight vectors in registers, the
// columns shared out over the consumer warps.
//
// A row is cut into pieces of 64 bytes; warp w has every fifteenth from piece w on. Lane 4 * g + c
// has 16 bytes of each: of the rows g and g + 8 of the tile, and of vector g. To an mma these are
// the operands of two k16 steps with the columns in another order, which is the same for both
// operands and so does not matter to their product: all loads are of 16 bytes, none is transposed.
#pragma once
#include "../common/convert.cuh"
#include "../common/pack.cuh"
#include "../ptx/mma.cuh"
#include "weight_ring.cuh"

constexpr int PIECE_BYTES = 64;
constexpr int MAX_PIECES = 8;  // of a warp

template <typename T, int ARCH>
constexpr bool HAS_MMA = ARCH >= 80 || !T::IS_BFLOAT16;
template <int ARCH>
constexpr bool HAS_MMA<float, ARCH> = false;

// A lane's share of the eight vectors, in the type of the weights; zeros beyond their ends. If
// there are less than eight sequences, each has several vectors, whose products add up: of 2^bits
// sequences, vector m is of sequence m % 2^bits. Several of them share out its pieces: the k-th
// that the lane of vector m has is piece k * holders + m / 2^bits. One holder: they share something
// else.
struct Fragments {
  uint4 piece[MAX_PIECES];
  int bits;
  int holders;

  __device__ int sequence() const { return int(threadIdx.x % 32 / 4) & ((1 << bits) - 1); }
  __device__ int part() const { return int(threadIdx.x % 32 / 4) >> bits; }
  __device__ int rounds(int pieces) const { return ceil_div(pieces, holders); }
};

// Where a lane's share of piece `i` begins, in bytes from the beginning of the row.
__device__ __forceinline__ int piece_offset(int i) {
  return (i * CONSUMER_WARPS + int(threadIdx.x / 32)) * PIECE_BYTES + threadIdx.x % 4 * 16;
}

// Pieces of this warp of a row.
__device__ __forceinline__ int pieces_of_warp(int bytes) {
  return ceil_div(max(bytes - int(threadIdx.x / 32) * PIECE_BYTES, 0),
                  CONSUMER_WARPS * PIECE_BYTES);
}

// Warps that have a piece of a row.
__device__ __forceinline__ int warps_of_row(int bytes) {
  return min(CONSUMER_WARPS, ceil_div(bytes, PIECE_BYTES));
}

// Adds to d what mma_m16n8k16 would, for the types that it lacks: `low` and `high` are 16 bytes of
// rows g and g + 8. sums[0] and [1] are of these rows with every vector, over a lane's own columns.
template <typename T>
__device__ __forceinline__ void add_products(float (&sums)[2][MAX_BATCH], const uint4& low,
                                             const uint4& high, const uint4& x, int batch) {
  constexpr int PER_WORD = 4 / sizeof(T);
  using Word = Pack<T, PER_WORD>;
  const uint32_t words[3][4] = {
      {low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}, {x.x, x.y, x.z, x.w}};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Word a = __builtin_bit_cast(Word, words[0][i]);
    const Word b = __builtin_bit_cast(Word, words[1][i]);
#pragma unroll
    for (int n = 0; n < MAX_BATCH; ++n) {
      if (n >= batch) continue;
      const Word y = __builtin_bit_cast(
          Word, __shfl_sync(0xffffffffu, words[2][i], 4 * n + int(threadIdx.x % 4)));
#pragma unroll
      for (int j = 0; j < PER_WORD; ++j) {
        sums[0][n] += to_float(a.values[j]) * to_float(y.values[j]);
        sums[1][n] += to_float(b.values[j]) * to_float(y.values[j]);
      }
    }
  }
}

// Sums over the four lanes of a row; each keeps the two columns that an mma would leave to it.
__device__ __forceinline__ void gather_sums(float (&d)[4], const float (&sums)[2][MAX_BATCH]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < MAX_BATCH; ++n) {
      float sum = sums[half][n];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (threadIdx.x % 4 == n / 2) d[2 * half + n % 2] = sum;
    }
  }
}

// d: the products of a warp's columns in the layout of an mma accumulator: rows g and g + 8 of the
// tile, vectors 2c and 2c + 1. Rows from `count` on are anything.
template <typename T, int ARCH>
__device__ __forceinline__ void row_dot(float (&d)[4], const uint8_t* tile, int count, int pitch,
                                        int bytes, const Fragments& x, int vectors) {
  const int g = threadIdx.x % 32 / 4, pieces = pieces_of_warp(bytes);
  const int holders = HAS_MMA<T, ARCH> ? x.holders : 1, part = holders > 1 ? x.part() : 0;
  const uint8_t* low_row = tile + min(g, count - 1) * pitch;
  const uint8_t* high_row = tile + min(g + 8, count - 1) * pitch;
  float even[4] = {}, odd[4] = {}, sums[2][MAX_BATCH] = {};
#pragma unroll
  for (int k = 0; k < MAX_PIECES; ++k) {
    const int first = k * holders, most = min(holders, pieces - first);
    if (most <= 0) break;
#pragma unroll 1
    for (int h = 0; h < most; ++h) {
      const int offset = piece_offset(first + h);
      const uint4 y = holders == 1 || h == part ? x.piece[k] : uint4{0, 0, 0, 0};
      uint4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
      if (offset < bytes) {
        low = *reinterpret_cast<const uint4*>(low_row + offset);
        if (count > 8) high = *reinterpret_cast<const uint4*>(high_row + offset);
      }
      if constexpr (HAS_MMA<T, ARCH>) {
        mma_m16n8k16<T, ARCH>(even, {low.x, high.x, low.y, high.y}, y.x, y.y);
        mma_m16n8k16<T, ARCH>(odd, {low.z, high.z, low.w, high.w}, y.z, y.w);
      } else {
        add_products<T>(sums, low, high, y, vectors);
      }
    }
  }
  if constexpr (HAS_MMA<T, ARCH>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = even[i] + odd[i];
  } else {
    gather_sums(d, sums);
  }
}
