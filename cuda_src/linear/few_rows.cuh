// The few rows of x in shared memory, normalised if there is a norm, and what a tile of few.cuh is.
#pragma once
#include "../common/convert.cuh"
#include "../common/linear_params.cuh"
#include "../ptx/ld_global.cuh"
#include "epilogue.cuh"

constexpr int FEW_WARPS = 16;
constexpr int FEW_THREADS = FEW_WARPS * 32;
constexpr int MAX_FEW_ROWS = 16;
constexpr int TILE_PAIRS = 8;  // a tile is so many pairs of rows of weights
constexpr int STEP_BYTES = 64;
constexpr int SUMS_PITCH = 20;  // of 16 numbers: stores of a warp hit all banks

template <typename T, int ARCH>
constexpr bool HAS_MMA = ARCH >= 80 || !T::IS_BFLOAT16;
template <int ARCH>
constexpr bool HAS_MMA<float, ARCH> = false;

template <typename T_, int ROWS_, int VECTOR_, int ARCH_>
struct FewTile {
  using T = T_;
  static constexpr int ROWS = ROWS_;      // of x, at most
  static constexpr int VECTOR = VECTOR_;  // elements of a load
  static constexpr int ARCH = ARCH_;
  static constexpr bool MMA = HAS_MMA<T, ARCH>;
  static constexpr int LANE = 16 / sizeof(T);  // elements of a row that a lane has in a step
  static constexpr int STEP = 4 * LANE;
  // On their way at once, as many as there are registers for.
  static constexpr int STEPS = MMA || ROWS == 8 ? 4 : VECTOR > 1 ? 2 : 1;
  static constexpr int SUMS = FEW_WARPS * ROWS * SUMS_PITCH;
  static constexpr int X_OFFSET = (SUMS + 2 * MAX_FEW_ROWS) * sizeof(float);
};

// ---- rows in shared memory ----

struct SmemRows {
  char* data;
  int rows;
  int pitch;  // bytes

  // A pitch of 64 more than a multiple of 128 bytes: two rows lie in different banks.
  template <typename T>
  __device__ static int pitch_of(int depth) {
    const int bytes = (depth * int(sizeof(T)) + STEP_BYTES - 1) / STEP_BYTES * STEP_BYTES;
    return (bytes + 63) / 128 * 128 + 64;
  }
  __device__ char* at(int row, int byte) const { return data + row * pitch + byte; }
};

// LANE elements of a row from k on; zeros from `end` on.
template <class Tile>
__device__ __forceinline__ uint4 load_lane(const typename Tile::T* row, int k, int end) {
  uint4 value = {0, 0, 0, 0};
  if constexpr (Tile::VECTOR > 1) {
    if (k < end) value = ld_global_stream_128(row + k);
  } else {
#pragma unroll
    for (int i = 0; i < Tile::LANE; ++i)
      if (k + i < end) reinterpret_cast<typename Tile::T*>(&value)[i] = row[k + i];
  }
  return value;
}

// Copies rows of x, filled up with zeros to a whole number of steps.
template <class Tile>
__device__ __forceinline__ void stage_rows(const SmemRows& to, const typename Tile::T* x,
                                           int64_t stride, int depth) {
  constexpr int AT_ONCE = 4;
  for (int k = threadIdx.x * Tile::LANE; k < round_up(depth, Tile::STEP);
       k += FEW_THREADS * Tile::LANE) {
    for (int begin = 0; begin < to.rows; begin += AT_ONCE) {
      uint4 values[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int row = min(begin + i, to.rows - 1);
        values[i] = load_lane<Tile>(x + row * stride, k, depth);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (begin + i < to.rows)
          *reinterpret_cast<uint4*>(to.at(begin + i, k * sizeof(typename Tile::T))) = values[i];
      }
    }
  }
}

// ---- the norm ----

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}

// Normalises the rows where they are; `stats` has mean and 1 / deviation of each. The block has
// synchronised before; it must do so after.
template <class Tile>
__device__ __forceinline__ void normalise_rows(const SmemRows& x, int depth, const RowNorm& norm,
                                               const void* weight, const void* bias, float* stats) {
  using T = typename Tile::T;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < x.rows) {
    const T* row = reinterpret_cast<const T*>(x.at(warp, 0));
    float sum = 0.f, squares = 0.f;
    if (!norm.rms) {
#pragma unroll 4
      for (int k = 2 * lane; k < depth; k += 64)
        sum += to_float(row[k]) + to_float(row[k + 1]);  // behind the row is a zero
    }
    const float mean = warp_sum(sum) * norm.inverse_depth;
#pragma unroll 4
    for (int k = 2 * lane; k < depth; k += 64) {
      const float first = to_float(row[k]) - mean, second = to_float(row[k + 1]) - mean;
      squares += first * first + (k + 1 < depth ? second * second : 0.f);
    }
    squares = warp_sum(squares);
    if (lane == 0) {
      stats[2 * warp] = mean;
      stats[2 * warp + 1] = rsqrtf(squares * norm.inverse_depth + norm.eps);
    }
  }
  __syncthreads();
  for (int k = threadIdx.x * Tile::LANE; k < depth; k += FEW_THREADS * Tile::LANE) {
    float weights[Tile::LANE], biases[Tile::LANE];
#pragma unroll
    for (int i = 0; i < Tile::LANE; ++i) {
      const bool inside = k + i < depth;
      weights[i] = inside ? element<T>(weight, k + i, norm.wide) : 0.f;
      biases[i] = inside && bias ? element<T>(bias, k + i, norm.wide) : 0.f;
    }
#pragma unroll 1
    for (int row = 0; row < x.rows; ++row) {
      const float mean = stats[2 * row], scale = stats[2 * row + 1];
      uint4 value = *reinterpret_cast<uint4*>(x.at(row, k * sizeof(T)));
      T* elements = reinterpret_cast<T*>(&value);
#pragma unroll
      for (int i = 0; i < Tile::LANE; ++i) {
        const float normal = (to_float(elements[i]) - mean) * scale;
        elements[i] = from_float<T>(k + i < depth ? normal * weights[i] + biases[i] : 0.f);
      }
      *reinterpret_cast<uint4*>(x.at(row, k * sizeof(T))) = value;
    }
  }
}
