// Products of the rows of a tile in shared memory with up to eight vectors in registers. The
// consumer warps divide the columns of a row (common/small_m_mma.cuh has the step of it).
//
// A row consists of pieces of 64 bytes, and warp w has every seventh, from piece w on. Lane 4 g + c
// has 16 bytes of each piece: of rows g and g + 8 of the tile, and of vector g. The vectors are in
// registers, because every product has others, which each warp loads from L2 itself. (The products
// of linear/small_m_sums.cuh have up to 32 rows of x, in shared memory.)
#pragma once
#include "../common/convert.cuh"
#include "../common/pack.cuh"
#include "../common/small_m_mma.cuh"
#include "../common/warp.cuh"
#include "params.cuh"
#include "weight_ring.cuh"

constexpr int PIECE_BYTES = 64;
constexpr int MAX_PIECES = 18;  // the most pieces of a warp
constexpr int PIECE_STRIDE = CONSUMER_WARPS * PIECE_BYTES;

// A lane's share of the eight vectors, in the type of the weights, for at most MOST_PIECES pieces
// of a warp, with zeros beyond the ends of the vectors. With fewer than eight sequences, each has
// several vectors, whose products are added: vector m belongs to sequence m % SEQUENCES. HOLDERS
// vectors of a sequence divide its pieces: piece k of the lane of vector m is piece
// k * HOLDERS + m / SEQUENCES of the warp. With HOLDERS = 1 the vectors divide something else, as
// in load_attended().
template <int SEQUENCES_, int HOLDERS_, int MOST_PIECES_>
struct Fragments {
  static constexpr int SEQUENCES = SEQUENCES_, HOLDERS = HOLDERS_, MOST_PIECES = MOST_PIECES_;
  static constexpr int PIECES = ceil_div(MOST_PIECES, HOLDERS);  // pieces of a lane

  uint4 piece[PIECES];

  static __device__ int sequence() { return threadIdx.x % 32 / 4 % SEQUENCES; }
  static __device__ int part() { return threadIdx.x % 32 / 4 / SEQUENCES; }
  static __device__ int first_piece() { return HOLDERS > 1 ? part() : 0; }
  // The number of pieces of a lane in rows of this size.
  static __device__ int pieces(int bytes);
};

// The offset of a lane's share of piece `i`, in bytes from the beginning of the row.
__device__ __forceinline__ int piece_offset(int i) {
  return i * PIECE_STRIDE + int(threadIdx.x / 32) * PIECE_BYTES + threadIdx.x % 4 * 16;
}

template <int SEQUENCES, int HOLDERS, int MOST>
__device__ __forceinline__ int Fragments<SEQUENCES, HOLDERS, MOST>::pieces(int bytes) {
  return ceil_div(max(bytes - piece_offset(first_piece()), 0), PIECE_STRIDE * HOLDERS);
}

// The number of pieces of this warp in a row.
__device__ __forceinline__ int pieces_of_warp(int bytes) {
  return ceil_div(max(bytes - int(threadIdx.x / 32) * PIECE_BYTES, 0), PIECE_STRIDE);
}

// Adds the products that mma_step() would compute, for the types that mma.sync lacks. `low` and
// `high` are 16 bytes of rows g and g + 8. sums[0] and sums[1] are the products of these rows with
// the first VECTORS vectors, over a lane's own columns; the other vectors are 0.
template <typename T, int VECTORS>
__device__ __forceinline__ void add_products(float (&sums)[2][MAX_BATCH], const uint4& low,
                                             const uint4& high, const uint4& x) {
  constexpr int PER_WORD = 4 / sizeof(T);
  using Word = Pack<T, PER_WORD>;
  const uint32_t words[3][4] = {
      {low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}, {x.x, x.y, x.z, x.w}};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Word a = __builtin_bit_cast(Word, words[0][i]);
    const Word b = __builtin_bit_cast(Word, words[1][i]);
#pragma unroll
    for (int n = 0; n < VECTORS; ++n) {
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

// Sums over the four lanes of a row. Each lane keeps the two columns that it would have after an
// mma.
__device__ __forceinline__ void gather_sums(float (&d)[4], const float (&sums)[2][MAX_BATCH]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < MAX_BATCH; ++n) {
      const float sum = quad_sum(sums[half][n]);
      if (threadIdx.x % 4 == n / 2) d[2 * half + n % 2] = sum;
    }
  }
}

// Computes d, the products over a warp's columns, in the layout of an mma accumulator: rows g and
// g + 8 of the tile, vectors 2c and 2c + 1. Rows from `count` on are undefined. With up to 8 rows,
// the upper half of an mma takes the next piece of the same rows, which another holder has.
enum class TileRows { UP_TO_8, UP_TO_16 };
template <typename T, int ARCH, int VECTORS, TileRows ROWS, class X>
__device__ __forceinline__ void row_dot(float (&d)[4], const uint8_t* tile, int count, int pitch,
                                        int bytes, const X& x) {
  constexpr bool HALF = ROWS == TileRows::UP_TO_8;
  constexpr int AT_ONCE = !HAS_MMA<T, ARCH> ? 1 : HALF ? 2 : 4;  // for the latency of shared memory
  constexpr int STEP = HALF ? 2 : 1;                             // pieces
  static_assert(!HALF || (HAS_MMA<T, ARCH> && X::HOLDERS % 2 == 0));
  const int g = threadIdx.x % 32 / 4, part = x.first_piece();
  const uint8_t* low_row = tile + min(g, count - 1) * pitch + piece_offset(0);
  const uint8_t* high_row =
      HALF ? low_row + PIECE_STRIDE : tile + min(g + 8, count - 1) * pitch + piece_offset(0);
  const int left = bytes - piece_offset(0), left_high = HALF ? left - PIECE_STRIDE : left;
  const int left_of_warp = bytes - int(threadIdx.x / 32) * PIECE_BYTES;
  float chains[4][4] = {}, sums[2][MAX_BATCH] = {};
#pragma unroll
  for (int begin = 0; begin < X::MOST_PIECES; begin += AT_ONCE * STEP) {
    if (begin * PIECE_STRIDE >= left_of_warp) break;
    uint4 low[AT_ONCE] = {}, high[AT_ONCE] = {};
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int offset = (begin + i * STEP) * PIECE_STRIDE;
      if (offset < left) low[i] = *reinterpret_cast<const uint4*>(low_row + offset);
      if (offset < left_high) high[i] = *reinterpret_cast<const uint4*>(high_row + offset);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int piece = begin + i * STEP, holder = piece % X::HOLDERS;
      if (piece >= X::MOST_PIECES) break;
      const bool holds = holder / STEP == part / STEP;
      const uint4 y = holds ? x.piece[piece / X::HOLDERS] : uint4{0, 0, 0, 0};
      if constexpr (HAS_MMA<T, ARCH>) {
        float (&even)[4] = chains[i % 2 * 2], (&odd)[4] = chains[i % 2 * 2 + 1];
        mma_step<T, ARCH>(even, low[i], high[i], y, 0);
        mma_step<T, ARCH>(odd, low[i], high[i], y, 1);
      } else {
        add_products<T, VECTORS>(sums, low[i], high[i], y);
      }
    }
  }
  if constexpr (HAS_MMA<T, ARCH>) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      d[i] = (chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i]);
  } else {
    gather_sums(d, sums);
  }
  if constexpr (HALF) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if ((threadIdx.x % 4 * 2 + i) / X::SEQUENCES % 2) d[i] = d[i + 2];
  }
}
