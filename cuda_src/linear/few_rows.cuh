// The few rows of x in shared memory, normalised if there is a norm, and what a tile of few.cuh is.
#pragma once
#include "../common/convert.cuh"
#include "../common/linear_params.cuh"
#include "../common/warp.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ld_global.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/opaque.cuh"
#include "epilogue.cuh"

constexpr int FEW_WARPS = 8;
constexpr int FEW_THREADS = FEW_WARPS * 32;
constexpr int MAX_FEW_ROWS = 16;
constexpr int TILE_PAIRS = 16;  // a tile is up to so many pairs of rows of weights
constexpr int SLICE_BYTES = 128;
constexpr int STAGE_BYTES = 2 * TILE_PAIRS * SLICE_BYTES;
constexpr int SUMS_PITCH = 36;  // of 32 numbers: stores of a warp hit all banks

template <typename T, int ARCH>
constexpr bool HAS_MMA = ARCH >= 80 || !T::IS_BFLOAT16;
template <int ARCH>
constexpr bool HAS_MMA<float, ARCH> = false;

template <typename T_, int ROWS_, int VECTOR_, int NUM_STAGES_, int ARCH_>
struct FewTile {
  using T = T_;
  static constexpr int ROWS = ROWS_;      // of x, at most
  static constexpr int VECTOR = VECTOR_;  // elements of a load
  static constexpr int NUM_STAGES = NUM_STAGES_;
  static constexpr int ARCH = ARCH_;
  static constexpr bool MMA = HAS_MMA<T, ARCH>;
  static constexpr bool ASYNC = VECTOR > 1 && ARCH >= 80;
  static constexpr int LANE = 16 / sizeof(T);  // elements of 16 bytes
  static constexpr int SLICE = SLICE_BYTES / sizeof(T);
  // Shared memory: the rings of all warps, sums, statistics of the norm, x.
  static constexpr int RING_BYTES = NUM_STAGES * STAGE_BYTES;
  static constexpr int SUMS_OFFSET = FEW_WARPS * RING_BYTES;
  static constexpr int SUMS = FEW_WARPS * ROWS * SUMS_PITCH;
  static constexpr int X_OFFSET = SUMS_OFFSET + (SUMS + 2 * MAX_FEW_ROWS) * sizeof(float);
};

// ---- 16 bytes of a row, from k on; zeros from `depth` on ----

template <class Tile>
__device__ __forceinline__ uint4 load_lane(const typename Tile::T* row, int k, int depth) {
  uint4 value = {0, 0, 0, 0};
  if constexpr (Tile::VECTOR > 1) {
    if (k < depth) value = ld_global_stream_128(row + k);
  } else {
#pragma unroll
    for (int i = 0; i < Tile::LANE; ++i)
      if (k + i < depth) reinterpret_cast<typename Tile::T*>(&value)[i] = row[k + i];
  }
  return value;
}

// The same to shared memory; asynchronous where that is possible.
template <class Tile>
__device__ __forceinline__ void copy_lane(uint32_t to, const typename Tile::T* row, int k,
                                          int depth) {
  if constexpr (Tile::ASYNC)
    cp_async_stream_16(to, row + (k < depth ? k : 0), k < depth);
  else
    st_shared_128(to, load_lane<Tile>(row, k, depth));
}

// ---- rows in shared memory ----

struct SmemRows {
  char* data;
  int rows;
  int pitch;  // bytes

  // A pitch of 64 more than a multiple of 128 bytes: two rows lie in different banks.
  template <typename T>
  __device__ static int pitch_of(int depth) {
    return round_up(depth * int(sizeof(T)), SLICE_BYTES) + 64;
  }
  __device__ char* at(int row, int byte) const { return data + row * pitch + byte; }
};

// Copies rows of x, filled up with zeros to a whole number of slices. Without waiting for them.
template <class Tile>
__device__ __forceinline__ void copy_rows(const SmemRows& to, const typename Tile::T* x,
                                          int64_t stride, int depth) {
  const int padded = round_up(depth, Tile::SLICE);
  const uint32_t smem = smem_address(to.data);
#pragma unroll 1
  for (int row = 0; row < to.rows; ++row) {
#pragma unroll 1
    for (int k = threadIdx.x * Tile::LANE; k < padded; k += FEW_THREADS * Tile::LANE)
      copy_lane<Tile>(smem + to.pitch * row + k * int(sizeof(typename Tile::T)), x + row * stride,
                      k, depth);
  }
  copies_commit<Tile::ARCH>();
}

// ---- the norm ----

// Brings weight and bias, which are far away, closer while x is on its way.
template <typename T>
__device__ __forceinline__ void prefetch_norm(const RowNorm& norm, const void* weight,
                                              const void* bias, int depth) {
  const int size = norm.wide ? sizeof(float) : sizeof(T);
  for (int byte = threadIdx.x * 128; byte < depth * size; byte += FEW_THREADS * 128) {
    prefetch_l2(static_cast<const char*>(weight) + byte);
    if (bias) prefetch_l2(static_cast<const char*>(bias) + byte);
  }
}

// Normalises the rows where they are; `stats` has mean and 1 / deviation of each. The block has
// synchronised before; it must do so after.
template <class Tile>
__device__ __forceinline__ void normalise_rows(const SmemRows& x, int depth, const RowNorm& norm,
                                               const void* weight, const void* bias, float* stats) {
  using T = typename Tile::T;
  constexpr int LANE = Tile::LANE;
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < x.rows; row += FEW_WARPS) {
    float mean = 0.f, squares = 0.f;
    const auto pack_at = [&](int k) {
      return *reinterpret_cast<const uint4*>(x.at(row, k * sizeof(T)));
    };
    if (!norm.rms) {
#pragma unroll 2
      for (int k = lane * LANE; k < depth; k += 32 * LANE) {
        const uint4 pack = pack_at(k);
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < LANE; ++i) sum += to_float(reinterpret_cast<const T*>(&pack)[i]);
        mean += sum;  // behind the row are zeros
      }
      mean = warp_sum(mean) * norm.inverse_depth;
    }
#pragma unroll 2
    for (int k = lane * LANE; k < depth; k += 32 * LANE) {
      const uint4 pack = pack_at(k);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < LANE; ++i) {
        const float delta = to_float(reinterpret_cast<const T*>(&pack)[i]) - mean;
        sum += k + i < depth ? delta * delta : 0.f;
      }
      squares += sum;
    }
    squares = warp_sum(squares);
    if (lane == 0) {
      stats[2 * row] = mean;
      stats[2 * row + 1] = rsqrtf(squares * norm.inverse_depth + norm.eps);
    }
  }
  __syncthreads();
  for (int k = threadIdx.x * LANE; k < depth; k += FEW_THREADS * LANE) {
    float weights[LANE], biases[LANE];
#pragma unroll
    for (int i = 0; i < LANE; ++i) {
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
      for (int i = 0; i < LANE; ++i) {
        const float normal = (to_float(elements[i]) - mean) * scale;
        elements[i] = from_float<T>(k + i < depth ? normal * weights[i] + biases[i] : 0.f);
      }
      *reinterpret_cast<uint4*>(x.at(row, k * sizeof(T))) = value;
    }
  }
}
