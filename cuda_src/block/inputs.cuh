// The vectors that go into a product. A warp loads them from global memory, where the blocks have
// written them, into the fragments of row_dot.cuh.
#pragma once
#include "../ptx/math.cuh"
#include "../ptx/warpgroup.cuh"
#include "params.cuh"
#include "row_dot.cuh"
#include "steps.cuh"
#include "tagged_words.cuh"

constexpr int CONSUMERS = 32 * CONSUMER_WARPS;

enum class NamedBarrier { CONSUMERS = 1 };
__device__ __forceinline__ void consumers_sync() {
  named_barrier_sync(NamedBarrier::CONSUMERS, CONSUMERS);
}

template <typename T>
constexpr int LANE_COLUMNS = 16 / sizeof(T);  // columns of a lane in a piece

// The pieces of a warp in the widest vector that is normalised; as floats they fit the registers.
constexpr int MAX_WIDTH = 1920;
template <typename T>
constexpr int WIDTH_PIECES = ceil_div(MAX_WIDTH * sizeof(T), PIECE_STRIDE);

// The vectors of a product. With tensor cores, the vectors of a sequence divide its pieces. Without
// them every vector would cost time, so a sequence has only one.
template <typename T, int ARCH, int SEQUENCES>
using SharedPieces = Fragments<HAS_MMA<T, ARCH> ? SEQUENCES : MAX_BATCH,
                               HAS_MMA<T, ARCH> ? MAX_BATCH / SEQUENCES : 1, MAX_PIECES>;

// The first column of a lane's share of a piece.
template <typename T>
__device__ __forceinline__ int column_of_piece(int i) {
  return piece_offset(i) / sizeof(T);
}

// The columns of a lane: those of its first piece begin at `first`, those of each further piece
// `step` later.
template <typename T>
struct LaneColumns {
  int first, step;

  template <class X>
  __device__ explicit LaneColumns(const X&)
      : first(column_of_piece<T>(X::first_piece())),
        step(PIECE_STRIDE / int(sizeof(T)) * X::HOLDERS) {
    static_assert(PIECE_STRIDE / sizeof(T) % 16 == 0, "else the places are other ones");
  }
  // The offset of a group of four words from the place of the first.
  __device__ int operator()(int four) const {
    constexpr int FOURS = LANE_COLUMNS<T> / 4;
    return four / FOURS * step + four % FOURS * NEXT_FOUR;
  }
};

// The number of columns of a vector that this warp has.
template <typename T>
__device__ __forceinline__ int columns_of_warp(int width) {
  constexpr int OF_PIECE = PIECE_BYTES / sizeof(T);
  const int pieces = pieces_of_warp(width * int(sizeof(T)));
  const int last = ((pieces - 1) * CONSUMER_WARPS + int(threadIdx.x / 32)) * OF_PIECE;
  return pieces ? (pieces - 1) * OF_PIECE + min(width - last, OF_PIECE) : 0;
}

// One of the numbers in 16 bytes. Numbers that are kept in this form take half of the registers.
template <typename T>
__device__ __forceinline__ float column_of(const uint4& piece, int column) {
  using Columns = Pack<T, LANE_COLUMNS<T>>;
  // Without this NVRTC 12.8 has not instantiated the pack when it compares the sizes.
  static_assert(sizeof(Columns) == sizeof(piece), "a piece is one pack");
  return to_float(__builtin_bit_cast(Columns, piece).values[column]);
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

// The mean and variance of some columns of a row, for LayerNorm.
struct alignas(16) Moments {
  float count;
  float mean;
  float squares;  // the sum of the squared distances from the mean
};

// Sums a, and b, over the lanes of a sequence.
template <int SEQUENCES>
__device__ __forceinline__ void add_lanes(float& a, float& b) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    if (mask >= 4 && mask < 4 * SEQUENCES) continue;
    a += __shfl_xor_sync(0xffffffffu, a, mask);
    b += __shfl_xor_sync(0xffffffffu, b, mask);
  }
}

// LayerNorm of the residual; its weight and bias are the two rows in front of a tile.
//
// A warp computes its sums relative to the first of its numbers. The squared distance of that
// number from the mean is at most the count times the variance, and usually much less, so little is
// lost by the subtraction. The moments of the warps are merged as in Chan, Golub and LeVeque 1983,
// relative to the mean of the first warp, so that both sums go through the lanes at the same time.
template <typename T, int ARCH, int SEQUENCES, class X>
__device__ __forceinline__ void load_normalised(X& x, const DecodeStackParams& params,
                                                const uint8_t* tile, int pitch, uint32_t tag,
                                                Moments (&moments)[CONSUMER_WARPS][MAX_BATCH]) {
  constexpr int COLUMNS = LANE_COLUMNS<T>, FOURS = COLUMNS / 4;
  constexpr int PIECES = ceil_div(WIDTH_PIECES<T>, X::HOLDERS);
  const int warp = threadIdx.x / 32, c = threadIdx.x % 4, n = x.sequence(), part = x.part();
  const int pieces = n < params.batch ? x.pieces(params.width * int(sizeof(T))) : 0;
  const float count = columns_of_warp<T>(params.width);
  const LaneColumns<T> columns(x);

  uint4 words[PIECES * FOURS];
  receive(words, pieces * FOURS, tag,
          residual_word(params, own_copy<SEQUENCES>(), n, columns.first), columns);

  // ---- moments: of a lane, of a warp, of the row ----
  const float first = __shfl_sync(0xffffffffu, __uint_as_float(words[0].x), 4 * n);
  float sum = 0.f, squares = 0.f;
#pragma unroll
  for (int k = 0; k < PIECES; ++k) {
    if (k >= pieces) break;
    float values[COLUMNS];
    to_floats(values, words, k * FOURS);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const float difference = values[j] - first;
      sum += difference;
      squares += difference * difference;
    }
  }
  add_lanes<X::SEQUENCES>(sum, squares);
  if (c == 0 && part == 0) {
    const float distance = count > 0.f ? sum * rcp_approx(count) : 0.f;
    moments[warp][n] = {count, count > 0.f ? first + distance : 0.f, squares - sum * distance};
  }
  consumers_sync();
  constexpr int WARPS_OF_LANE = ceil_div(CONSUMER_WARPS, 4);
  const float inverse_width = rcp_approx(params.width), first_mean = moments[0][n].mean;
  sum = squares = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS_OF_LANE; ++i) {
    if (4 * i + c >= CONSUMER_WARPS) continue;
    const Moments of_warp = moments[4 * i + c][n];
    const float distance = of_warp.mean - first_mean;
    sum += of_warp.count * distance;
    squares += of_warp.squares + of_warp.count * distance * distance;
  }
  const float offset = quad_sum(sum) * inverse_width, mean = first_mean + offset;
  const float variance = fmaxf(quad_sum(squares) * inverse_width - offset * offset, 0.f);
  const float scale = rsqrtf(variance + params.eps);

  // ---- normalise ----
#pragma unroll
  for (int k = 0; k < X::PIECES; ++k) {
    x.piece[k] = {0, 0, 0, 0};
    if (k >= min(PIECES, pieces)) continue;
    const T* lead = reinterpret_cast<const T*>(tile) + columns.first + k * columns.step;
    const auto weight = load_pack<COLUMNS>(lead);
    const auto bias = load_pack<COLUMNS>(lead + pitch / int(sizeof(T)));
    float y[COLUMNS];
    to_floats(y, words, k * FOURS);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
      y[j] = (y[j] - mean) * scale * to_float(weight.values[j]) + to_float(bias.values[j]);
    x.piece[k] = to_piece<T, ARCH>(y);
  }
}

// Loads `size` columns of the vectors of the hidden layer, from `first` on, as many pieces at a
// time as the registers allow.
template <typename T, int ARCH, int SEQUENCES, class X>
__device__ __forceinline__ void load_hidden(X& x, const DecodeStackParams& params, int first,
                                            int size, uint32_t tag) {
  constexpr int COLUMNS = LANE_COLUMNS<T>, FOURS = COLUMNS / 4;
  constexpr int AT_ONCE = X::PIECES < 5 ? X::PIECES : 5;
  const int n = x.sequence();
  const int pieces = n < params.batch ? x.pieces(size * int(sizeof(T))) : 0;
  const LaneColumns<T> columns(x);
  const float* row = hidden_word(params, own_copy<SEQUENCES>(), n, first + columns.first);
#pragma unroll
  for (int begin = 0; begin < X::PIECES; begin += AT_ONCE) {
    if (begin * X::HOLDERS >= pieces_of_warp(size * int(sizeof(T))))
      break;  // for all lanes of the warp
    uint4 words[AT_ONCE * FOURS];
    receive(words, max(pieces - begin, 0) * FOURS, tag, row,
            [&](int i) { return columns(begin * FOURS + i); });
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      if (begin + k >= X::PIECES) break;
      float values[COLUMNS];
      to_floats(values, words, k * FOURS);
      x.piece[begin + k] = begin + k < pieces ? to_piece<T, ARCH>(values) : uint4{0, 0, 0, 0};
    }
  }
}
