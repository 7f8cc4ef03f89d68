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
constexpr int PIECE_STRIDE = CONSUMER_WARPS * PIECE_BYTES;

template <typename T, int ARCH>
constexpr bool HAS_MMA = ARCH >= 80 || !T::IS_BFLOAT16;
template <int ARCH>
constexpr bool HAS_MMA<float, ARCH> = false;

// A lane's share of the eight vectors, in the type of the weights; zeros beyond their ends. If
// there are less than eight sequences, each has several vectors, whose products add up: of 2^bits
// sequences, vector m is of sequence m % 2^bits. Several of them share out its pieces: the k-th
// that the lane of vector m has is piece (k << holder_bits) + m / 2^bits. If that is 0 they share
// something else.
struct Fragments {
  uint4 piece[MAX_PIECES];
  int bits;
  int holder_bits;

  __device__ int sequence() const { return int(threadIdx.x % 32 / 4) & ((1 << bits) - 1); }
  __device__ int part() const { return int(threadIdx.x % 32 / 4) >> bits; }
  __device__ int first_piece() const { return holder_bits ? part() : 0; }
  // How many a lane has of rows of this size.
  __device__ int pieces(int bytes) const;
};

// Where a lane's share of piece `i` begins, in bytes from the beginning of the row.
__device__ __forceinline__ int piece_offset(int i) {
  return i * PIECE_STRIDE + int(threadIdx.x / 32) * PIECE_BYTES + threadIdx.x % 4 * 16;
}

__device__ __forceinline__ int Fragments::pieces(int bytes) const {
  const int own = ceil_div(max(bytes - piece_offset(first_piece()), 0), PIECE_STRIDE);
  return (own + (1 << holder_bits) - 1) >> holder_bits;
}

// Pieces of this warp of a row.
__device__ __forceinline__ int pieces_of_warp(int bytes) {
  return ceil_div(max(bytes - int(threadIdx.x / 32) * PIECE_BYTES, 0), PIECE_STRIDE);
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
  constexpr int AT_ONCE = HAS_MMA<T, ARCH> ? 2 : 1;  // pieces, for the latency of shared memory
  const int g = threadIdx.x % 32 / 4, lane = threadIdx.x % 4 * 16;
  const int holders = HAS_MMA<T, ARCH> ? 1 << x.holder_bits : 1, part = holders > 1 ? x.part() : 0;
  const uint8_t* low_row = tile + min(g, count - 1) * pitch + piece_offset(0);
  const uint8_t* high_row = tile + min(g + 8, count - 1) * pitch + piece_offset(0);
  int left = bytes + lane - piece_offset(0);  // of the row, from the next piece on
  float even[4] = {}, odd[4] = {}, sums[2][MAX_BATCH] = {};
#pragma unroll
  for (int k = 0; k < MAX_PIECES; ++k) {
    if (left <= 0) break;
    int h = 0;
#pragma unroll 1
    do {
      uint4 low[AT_ONCE] = {}, high[AT_ONCE] = {};
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if ((i > 0 && i >= holders) || i * PIECE_STRIDE + lane >= left) continue;
        low[i] = *reinterpret_cast<const uint4*>(low_row + i * PIECE_STRIDE);
        high[i] = *reinterpret_cast<const uint4*>(high_row + i * PIECE_STRIDE);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (i > 0 && (i >= holders || i * PIECE_STRIDE >= left)) break;
        const uint4 y = h + i == part ? x.piece[k] : uint4{0, 0, 0, 0};
        if constexpr (HAS_MMA<T, ARCH>) {
          mma_m16n8k16<T, ARCH>(even, {low[i].x, high[i].x, low[i].y, high[i].y}, y.x, y.y);
          mma_m16n8k16<T, ARCH>(odd, {low[i].z, high[i].z, low[i].w, high[i].w}, y.z, y.w);
        } else {
          add_products<T>(sums, low[i], high[i], y, vectors);
        }
      }
      const int step = min(AT_ONCE, holders) * PIECE_STRIDE;
      low_row += step, high_row += step, left -= step;
      h += AT_ONCE;
    } while (h < holders && left > 0);
  }
  if constexpr (HAS_MMA<T, ARCH>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = even[i] + odd[i];
  } else {
    gather_sums(d, sums);
  }
}
