// The vectors that go into a product, from what the blocks have left in global memory to the
// fragments of row_dot.cuh.
#pragma once
#include "../common/transformer_params.cuh"
#include "../ptx/ld_global.cuh"
#include "../ptx/warpgroup.cuh"
#include "decode_steps.cuh"
#include "row_dot.cuh"

constexpr int CONSUMERS = 32 * CONSUMER_WARPS;

__device__ __forceinline__ void consumers_sync() { named_barrier_sync(1, CONSUMERS); }

template <typename T>
constexpr int LANE_COLUMNS = 16 / sizeof(T);  // of a piece

// Pieces of a warp of the widest vector that is normalised: as floats they fit into registers.
constexpr int MAX_WIDTH = 1920;
template <typename T>
constexpr int WIDTH_PIECES = MAX_WIDTH * sizeof(T) / PIECE_BYTES / CONSUMER_WARPS;

// `COUNT` neighbouring numbers.
template <int COUNT>
__device__ __forceinline__ void load_floats(float (&values)[COUNT], const float* data) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const auto four = __builtin_bit_cast(Pack<float, 4>, ld_global_cg_128(data + i));
#pragma unroll
    for (int j = 0; j < 4; ++j) values[i + j] = four.values[j];
  }
}

// One of the numbers in 16 bytes. Kept as such they take half of the registers.
template <typename T>
__device__ __forceinline__ float column_of(const uint4& piece, int column) {
  return to_float(__builtin_bit_cast(Pack<T, LANE_COLUMNS<T>>, piece).values[column]);
}

template <typename T>
__device__ __forceinline__ uint4 to_piece(const float (&values)[LANE_COLUMNS<T>]) {
  Pack<T, LANE_COLUMNS<T>> pack;
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS<T>; ++i) pack.values[i] = from_float<T>(values[i]);
  return __builtin_bit_cast(uint4, pack);
}

// Columns of vectors of `width` that a warp has.
template <typename T>
__device__ __forceinline__ int columns_of_warp(int warp, int width) {
  constexpr int PIECE = PIECE_BYTES / sizeof(T), ROUND = CONSUMER_WARPS * PIECE;
  const int last = width % ROUND - warp * PIECE;
  return width / ROUND * PIECE + max(0, min(PIECE, last));
}

// Of the columns of a warp in one row; `squares` sums the squared deviations from `mean`.
struct alignas(16) Moments {
  float mean, squares, columns;
};

// LayerNorm of the residual; its weight and bias are the two rows in front of a tile.
template <typename T>
__device__ __forceinline__ void load_normalised(Fragments& x, const DecodeStackParams& params,
                                                const uint8_t* tile, int pitch,
                                                Moments (&moments)[CONSUMER_WARPS][MAX_BATCH]) {
  constexpr int COLUMNS = LANE_COLUMNS<T>, PIECES = WIDTH_PIECES<T>;
  const int warp = threadIdx.x / 32, n = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const float* row = params.residual + n * params.width;
  const int pieces = pieces_of_warp(params.width * int(sizeof(T)));
  const float inverse_width = rcp_approx(params.width);
  float values[PIECES][COLUMNS] = {};

  // ---- read, moments of the warp's columns ----
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int column = piece_offset(i) / sizeof(T);
    if (column < params.width && n < params.batch) load_floats(values[i], row + column);
  }
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    if (i >= pieces) break;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) sum += values[i][j];
  }
  const int columns = columns_of_warp<T>(warp, params.width);
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  const float warp_mean = sum * rcp_approx(max(columns, 1));
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    if (piece_offset(i) / sizeof(T) >= params.width) break;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
      squares += (values[i][j] - warp_mean) * (values[i][j] - warp_mean);
  }
  squares += __shfl_xor_sync(0xffffffffu, squares, 1);
  squares += __shfl_xor_sync(0xffffffffu, squares, 2);
  if (c == 0) moments[warp][n] = {warp_mean, squares, float(columns)};
  consumers_sync();

  // ---- moments of the row: each of four lanes has a share of the warps ----
  constexpr int SHARE = ceil_div(CONSUMER_WARPS, 4);
  Moments part[SHARE];
  float mean = 0.f;
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const int other = 4 * i + c;
    part[i] = other < CONSUMER_WARPS ? moments[other][n] : Moments{0.f, 0.f, 0.f};
    mean += part[i].columns * part[i].mean;
  }
  mean += __shfl_xor_sync(0xffffffffu, mean, 1);
  mean += __shfl_xor_sync(0xffffffffu, mean, 2);
  mean *= inverse_width;
  squares = 0.f;
#pragma unroll
  for (int i = 0; i < SHARE; ++i)
    squares += part[i].squares + part[i].columns * (part[i].mean - mean) * (part[i].mean - mean);
  squares += __shfl_xor_sync(0xffffffffu, squares, 1);
  squares += __shfl_xor_sync(0xffffffffu, squares, 2);
  const float scale = rsqrtf(squares * inverse_width + params.eps);

  // ---- normalise ----
#pragma unroll
  for (int i = 0; i < MAX_PIECES; ++i) {
    x.piece[i] = {0, 0, 0, 0};
    if (i >= PIECES || piece_offset(i) / sizeof(T) >= params.width || n >= params.batch) continue;
    const auto weight = load_pack<COLUMNS>(reinterpret_cast<const T*>(tile + piece_offset(i)));
    const auto bias =
        load_pack<COLUMNS>(reinterpret_cast<const T*>(tile + pitch + piece_offset(i)));
    float (&y)[COLUMNS] = values[i < PIECES ? i : 0];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
      y[j] = (y[j] - mean) * scale * to_float(weight.values[j]) + to_float(bias.values[j]);
    x.piece[i] = to_piece<T>(y);
  }
}

// A vector of `columns` numbers for each of the sequences, `stride` apart, as it is.
template <typename T>
__device__ __forceinline__ void load_plain(Fragments& x, const T* data, int64_t stride, int columns,
                                           int batch) {
  const int n = threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < MAX_PIECES; ++i) {
    x.piece[i] = {0, 0, 0, 0};
    const int column = piece_offset(i) / sizeof(T);
    if (column < columns && n < batch) x.piece[i] = ld_global_cg_128(data + n * stride + column);
  }
}
