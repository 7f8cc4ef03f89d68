// The vectors that go into a product, from what the blocks have left in global memory to the
// fragments of row_dot.cuh.
#pragma once
#include "../common/transformer_params.cuh"
#include "../ptx/math.cuh"
#include "../ptx/warpgroup.cuh"
#include "decode_steps.cuh"
#include "row_dot.cuh"
#include "tagged_words.cuh"

constexpr int CONSUMERS = 32 * CONSUMER_WARPS;

__device__ __forceinline__ void consumers_sync() { named_barrier_sync(1, CONSUMERS); }

template <typename T>
constexpr int LANE_COLUMNS = 16 / sizeof(T);  // of a piece

// Pieces of a warp of the widest vector that is normalised: as floats they fit into registers.
constexpr int MAX_WIDTH = 1920;
template <typename T>
constexpr int WIDTH_PIECES = MAX_WIDTH * sizeof(T) / PIECE_BYTES / CONSUMER_WARPS;

// The first column of a lane's share of a piece.
template <typename T>
__device__ __forceinline__ int column_of_piece(int i) {
  return piece_offset(i) / sizeof(T);
}

// One of the numbers in 16 bytes. Kept as such they take half of the registers.
template <typename T>
__device__ __forceinline__ float column_of(const uint4& piece, int column) {
  return to_float(__builtin_bit_cast(Pack<T, LANE_COLUMNS<T>>, piece).values[column]);
}

template <typename T, int ARCH>
__device__ __forceinline__ uint4 to_piece(const float (&values)[LANE_COLUMNS<T>]) {
  if constexpr (HAS_MMA<T, ARCH>) {
    return {pack<T, ARCH>(values[0], values[1]), pack<T, ARCH>(values[2], values[3]),
            pack<T, ARCH>(values[4], values[5]), pack<T, ARCH>(values[6], values[7])};
  } else {
    Pack<T, LANE_COLUMNS<T>> pack;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS<T>; ++i) pack.values[i] = from_float<T>(values[i]);
    return __builtin_bit_cast(uint4, pack);
  }
}

// Sums over columns of a row of the numbers minus a shift, and of their squares.
struct Moments {
  float sum = 0.f, squares = 0.f;

  // Over the lanes of a sequence.
  __device__ void merge_lanes(int bits) {
#pragma unroll 1
    for (int mask = 1; mask < 32; mask = mask == 2 ? 4 << bits : 2 * mask) {
      sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      squares += __shfl_xor_sync(0xffffffffu, squares, mask);
    }
  }
};

// LayerNorm of the residual; its weight and bias are the two rows in front of a tile.
//
// One pass: the moments are about a number near the row, the mean of its first four. Its squared
// distance from the mean of the row is at most width / 4 times the variance, usually much less, so
// little is lost when the one is taken from the other.
template <typename T, int ARCH>
__device__ __forceinline__ void load_normalised(Fragments& x, const DecodeStackParams& params,
                                                const uint8_t* tile, int pitch, uint32_t tag,
                                                Moments (&moments)[CONSUMER_WARPS][MAX_BATCH]) {
  constexpr int COLUMNS = LANE_COLUMNS<T>, PIECES = WIDTH_PIECES<T>, FOURS = COLUMNS / 4;
  const int warp = threadIdx.x / 32, c = threadIdx.x % 4, n = x.sequence(), part = x.part();
  const int rounds = x.rounds(pieces_of_warp(params.width * int(sizeof(T))));
  auto piece = [&](int k) { return k * x.holders + part; };
  auto inside = [&](int k) {
    return column_of_piece<T>(piece(k)) < params.width && n < params.batch;
  };

  // ---- read: the first four of the row, then the pieces ----
  uint4 words[1 + PIECES * FOURS];
  receive(
      words, 1 + rounds * FOURS, tag, params.residual + n * params.width,
      [&](int i) {
        return i ? column_of_piece<T>(piece((i - 1) / FOURS)) + (i - 1) % FOURS * 4 : 0;
      },
      [&](int i) { return i ? inside((i - 1) / FOURS) : n < params.batch; });
  float near[4];
  to_floats(near, words, 0);
  const float shift = (near[0] + near[1] + near[2] + near[3]) * 0.25f;

  // ---- moments: of a lane, of a warp, of the row ----
  Moments own;
#pragma unroll
  for (int k = 0; k < PIECES; ++k) {
    if (k >= rounds) break;
    if (!inside(k)) continue;
    float values[COLUMNS];
    to_floats(values, words, 1 + k * FOURS);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const float difference = values[j] - shift;
      own.sum += difference;
      own.squares += difference * difference;
    }
  }
  own.merge_lanes(x.bits);
  if (c == 0 && part == 0) moments[warp][n] = own;
  consumers_sync();
  own = {};
#pragma unroll 1
  for (int i = 4 * part + c; i < CONSUMER_WARPS; i += 32 >> x.bits) {
    own.sum += moments[i][n].sum;
    own.squares += moments[i][n].squares;
  }
  own.merge_lanes(x.bits);
  const float inverse_width = rcp_approx(params.width), distance = own.sum * inverse_width;
  const float variance = fmaxf(own.squares * inverse_width - distance * distance, 0.f);
  const float mean = shift + distance, scale = rsqrtf(variance + params.eps);

  // ---- normalise ----
#pragma unroll
  for (int k = 0; k < PIECES; ++k) {
    if (k >= rounds) break;
    x.piece[k] = {0, 0, 0, 0};
    if (!inside(k)) continue;
    const uint8_t* lead = tile + piece_offset(piece(k));
    const auto weight = load_pack<COLUMNS>(reinterpret_cast<const T*>(lead));
    const auto bias = load_pack<COLUMNS>(reinterpret_cast<const T*>(lead + pitch));
    float y[COLUMNS];
    to_floats(y, words, 1 + k * FOURS);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
      y[j] = (y[j] - mean) * scale * to_float(weight.values[j]) + to_float(bias.values[j]);
    x.piece[k] = to_piece<T, ARCH>(y);
  }
}

// `columns` of the vectors of the hidden layer, from `first` on; as many pieces at once as
// registers allow.
template <typename T, int ARCH>
__device__ __forceinline__ void load_hidden(Fragments& x, const DecodeStackParams& params,
                                            int first, int columns, uint32_t tag) {
  constexpr int COLUMNS = LANE_COLUMNS<T>, FOURS = COLUMNS / 4, AT_ONCE = 4;
  const int n = x.sequence(), part = x.part();
  const int rounds = x.rounds(pieces_of_warp(columns * int(sizeof(T))));
  const float* row = params.hidden + int64_t(n) * params.hidden_width + first;
#pragma unroll
  for (int begin = 0; begin < MAX_PIECES; begin += AT_ONCE) {
    if (begin >= rounds) break;
    auto column = [&](int k) { return column_of_piece<T>((begin + k) * x.holders + part); };
    auto inside = [&](int k) { return column(k) < columns && n < params.batch; };
    uint4 words[AT_ONCE * FOURS];
    receive(
        words, (rounds - begin) * FOURS, tag, row,
        [&](int i) { return column(i / FOURS) + i % FOURS * 4; },
        [&](int i) { return inside(i / FOURS); });
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      if (begin + k >= min(rounds, MAX_PIECES)) break;
      float values[COLUMNS];
      to_floats(values, words, k * FOURS);
      x.piece[begin + k] = inside(k) ? to_piece<T, ARCH>(values) : uint4{0, 0, 0, 0};
    }
  }
}
