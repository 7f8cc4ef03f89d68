// The tile of small_m.cuh, and the rows of x in shared memory, normalised if there is a norm.
#pragma once
#include "../common/convert.cuh"
#include "../common/small_m_mma.cuh"
#include "../common/warp.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ld_global.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/opaque.cuh"
#include "epilogue.cuh"
#include "params.cuh"

constexpr int SMALL_M_WARPS = 8;
constexpr int SMALL_M_THREADS = SMALL_M_WARPS * 32;
constexpr int TILE_PAIRS = 16;  // a tile is up to so many pairs of rows of weights
constexpr int SLICE_BYTES = 128;
constexpr int STAGE_BYTES = 2 * TILE_PAIRS * SLICE_BYTES;
constexpr int SUMS_PITCH = 36;  // of 32 numbers: stores of a warp hit all banks
// Rows of x whose sums the warps share at a time, at most.
constexpr int MAX_SUM_ROWS = SMALL_M_THREADS / TILE_PAIRS;

template <typename T_, int ROWS_, int VECTOR_, int NUM_STAGES_, int ARCH_>
struct SmallMTile {
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
  static constexpr int SUMS_OFFSET = SMALL_M_WARPS * RING_BYTES;
  static constexpr int SUM_ROWS = ROWS < MAX_SUM_ROWS ? ROWS : MAX_SUM_ROWS;
  static constexpr int SUMS = SMALL_M_WARPS * SUM_ROWS * SUMS_PITCH;
  static constexpr int X_OFFSET = SUMS_OFFSET + (SUMS + 2 * ROWS) * sizeof(float);
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

// Copies such a pack of x to shared memory, asynchronously where that is possible.
template <class Tile>
__device__ __forceinline__ void copy_lane(uint32_t to, const typename Tile::T* row, int k,
                                          int depth) {
  if constexpr (Tile::ASYNC)
    cp_async_16(to, row + (k < depth ? k : 0), k < depth);
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

// Rows of x on their way to shared memory, filled up with zeros to a whole number of slices.
template <class Tile>
struct RowCopy {
  using T = typename Tile::T;
  SmemRows to;
  const T* x;
  int64_t stride;
  int depth;

  __device__ void copy(int row, int k) const {
    const uint32_t place = smem_address(to.at(row, k * int(sizeof(T))));
    copy_lane<Tile>(place, x + row * stride, k, depth);
  }
  // All of them, by the whole block.
  __device__ void all() const {
    const int padded = round_up(depth, Tile::SLICE);
    int row = 0, k = threadIdx.x * Tile::LANE;
#pragma unroll 1
    while (true) {
      while (k >= padded) k -= padded, ++row;
      if (row >= to.rows) break;
      copy(row, k);
      k += SMALL_M_THREADS * Tile::LANE;
    }
  }
  // The slice that begins at k, by a warp.
  __device__ void slice(int k) const {
#pragma unroll 1
    for (int row = threadIdx.x % 32 / 8; row < to.rows; row += 4)
      copy(row, k + threadIdx.x % 8 * Tile::LANE);
  }
};

// ---- the norm ----

// Brings weight and bias, which are far away, closer while x is on its way.
template <typename T>
__device__ __forceinline__ void prefetch_norm(const RowNorm& norm, const void* weight,
                                              const void* bias, int depth) {
  const int size = norm.wide ? sizeof(float) : sizeof(T);
  for (int byte = threadIdx.x * 128; byte < depth * size; byte += SMALL_M_THREADS * 128) {
    prefetch_l2(static_cast<const char*>(weight) + byte);
    if (bias) prefetch_l2(static_cast<const char*>(bias) + byte);
  }
}

// Whether element k of a pack that begins inside of a row is.
template <class Tile>
__device__ __forceinline__ bool inside(int k, int depth) {
  return Tile::VECTOR > 1 || k < depth;
}

// The rows of a warp, all at once: means of term(element, given) with what is given for each row.
template <class Tile, int N, class Term>
__device__ __forceinline__ void row_means(float (&means)[N], const SmemRows& x, int depth,
                                          const RowNorm& norm, const float (&given)[N], Term term) {
  using T = typename Tile::T;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sums[N] = {};
#pragma unroll 1
  for (int k = lane * Tile::LANE; k < depth; k += 32 * Tile::LANE) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int row =
          min(warp + j * SMALL_M_WARPS, x.rows - 1);  // the last one again if there is none
      const uint4 pack = *reinterpret_cast<const uint4*>(x.at(row, k * sizeof(T)));
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < Tile::LANE; ++i) {
        const float value = to_float(reinterpret_cast<const T*>(&pack)[i]);
        sum += inside<Tile>(k + i, depth) ? term(value, given[j]) : 0.f;
      }
      sums[j] += sum;
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) means[j] = warp_sum(sums[j]) * norm.inverse_depth;
}

// Normalises the rows where they are; `stats` has mean and 1 / deviation of each. The block has
// synchronised before; it must do so after.
template <class Tile>
__device__ __forceinline__ void normalise_rows(const SmemRows& x, int depth, const RowNorm& norm,
                                               const void* weight, const void* bias, float* stats) {
  using T = typename Tile::T;
  constexpr int LANE = Tile::LANE;
  constexpr int WARP_ROWS = Tile::ROWS / SMALL_M_WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < x.rows) {
    float means[WARP_ROWS] = {}, squares[WARP_ROWS];
    const auto itself = [](float value, float) { return value; };
    const auto square = [](float value, float mean) { return (value - mean) * (value - mean); };
    if (!norm.rms) row_means<Tile>(means, x, depth, norm, means, itself);
    row_means<Tile>(squares, x, depth, norm, means, square);
#pragma unroll
    for (int j = 0; j < WARP_ROWS; ++j) {
      const int row = warp + j * SMALL_M_WARPS;
      if (lane != 0 || row >= x.rows) continue;
      stats[2 * row] = means[j];
      stats[2 * row + 1] = rsqrtf(squares[j] + norm.eps);
    }
  }
  __syncthreads();
  // Each group of `width` threads takes a row: as many as the packs of a row want, a warp at least.
  const int width = min(round_up(ceil_div(depth, LANE), 32), SMALL_M_THREADS);
  const int groups = SMALL_M_THREADS / width, group = threadIdx.x / width;
  if (group >= groups) return;
#pragma unroll 1
  for (int k = threadIdx.x % width * LANE; k < depth; k += width * LANE) {
    float weights[LANE], biases[LANE];
#pragma unroll
    for (int i = 0; i < LANE; ++i) {
      weights[i] = inside<Tile>(k + i, depth) ? element<T>(weight, k + i, norm.wide) : 0.f;
      biases[i] = inside<Tile>(k + i, depth) && bias ? element<T>(bias, k + i, norm.wide) : 0.f;
    }
#pragma unroll 2
    for (int row = group; row < x.rows; row += groups) {
      const float mean = stats[2 * row], scale = stats[2 * row + 1];
      uint4 value = *reinterpret_cast<uint4*>(x.at(row, k * sizeof(T)));
      T* elements = reinterpret_cast<T*>(&value);
#pragma unroll
      for (int i = 0; i < LANE; ++i) {
        const float normal = (to_float(elements[i]) - mean) * scale;
        elements[i] =
            from_float<T>(inside<Tile>(k + i, depth) ? normal * weights[i] + biases[i] : 0.f);
      }
      *reinterpret_cast<uint4*>(x.at(row, k * sizeof(T))) = value;
    }
  }
}
