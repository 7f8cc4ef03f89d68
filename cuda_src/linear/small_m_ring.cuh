// How the warps of small_m.cuh get their weights: which rows, in which order, through which memory.
//
// Each warp fills and empties a ring of its own: a stage is one group of asynchronous copies, and a
// warp knows by the number of its groups which of them are complete, so there is no barrier. The
// ring of block/weight_ring.cuh is that of a whole block, with a warp that fills it and barriers:
// there warps wait for other blocks between products, and the copies must go on.
#pragma once
#include "small_m_rows.cuh"

// Pairs of rows of weights in tiles, all of the same size if possible.
struct EvenTiles {
  int pairs;
  int count;
  int size;

  __device__ EvenTiles(int pairs)
      : pairs(pairs), count(ceil_div(pairs, TILE_PAIRS)), size(ceil_div(pairs, max(count, 1))) {}

  // The pair in row `row` of a tile, -1 if there is none.
  __device__ int pair(int tile, int row) const {
    const int index = tile * size + row;
    return row < size && index < pairs ? index : -1;
  }
};

// The share of part number `part`, where `parts` share out `total`.
struct Share {
  int begin;
  int end;

  __device__ Share(int total, int part, int parts) {
    const int each = total / parts, rest = total % parts;
    begin = part * each + min(part, rest);
    end = begin + each + (part < rest);
  }
  __device__ int size() const { return end - begin; }
};

// A warp takes all tiles, and of each the slices of the depth at begin, begin + stride, ...
struct Walk {
  int tiles;
  int depth;
  int begin;
  int stride;
};

// 16 bytes of a row of a stage: rows that follow each other lie in different banks.
__device__ __forceinline__ int stage_byte(int row, int chunk) {
  return row * SLICE_BYTES + (chunk ^ (row % 2 * 4)) * 16;
}

// The slices that pass through the ring of a warp. Weights have its walk; row(tile, row, second) is
// a row of weights, null if there is none: what its place in the ring has then makes sums that
// nobody uses. With the weights of the first tile come the slices of x that they are multiplied
// with, unless x is there already.
template <class Tile, class Weights>
struct Slices {
  using T = typename Tile::T;
  static constexpr int COPIES = TILE_PAIRS / 4;  // of a lane, for each half of the pairs
  Weights weights;
  int tile = 0, k;
  const T* rows[2][COPIES];
  uint32_t present;  // a bit for each of them
  RowCopy<Tile> x;
  bool with_x;

  __device__ Slices(const Weights& weights, const RowCopy<Tile>& x, bool with_x)
      : weights(weights), k(weights.walk.begin), x(x), with_x(with_x) {}

  // Whether there is one more.
  __device__ __forceinline__ bool more() const {
    return tile < weights.walk.tiles && weights.walk.begin < weights.walk.depth;
  }

  __device__ __forceinline__ void copy_next(uint32_t stage) {
    const int lane_row = threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
    if (k == weights.walk.begin) {
      present = 0;
#pragma unroll
      for (int i = 0; i < 2 * COPIES; ++i) {
        const T* row = weights.row(tile, lane_row + i % COPIES * 4, i >= COPIES);
        rows[i / COPIES][i % COPIES] = row;
        present |= uint32_t(row != nullptr) << i;
      }
    }
    if (with_x) x.slice(k);
    // Opaque, or the compiler computes both again for every copy.
    const int k_lane = int(opaque(uint32_t(k + chunk * Tile::LANE)));
    const uint32_t to = opaque(stage + stage_byte(lane_row, chunk));
    const int depth = weights.walk.depth;
    if constexpr (Tile::ASYNC) {
#pragma unroll
      for (int i = 0; i < 2 * COPIES; ++i) {
        const bool valid = k_lane < depth;
        if (present >> i & 1)
          cp_async_stream_16(to + i * 4 * SLICE_BYTES,
                             rows[i / COPIES][i % COPIES] + (valid ? k_lane : 0), valid);
      }
    } else {
      uint4 values[2 * COPIES];  // all of them on their way before one is waited for
#pragma unroll
      for (int i = 0; i < 2 * COPIES; ++i) {
        const int end = present >> i & 1 ? depth : 0;
        values[i] = load_lane<Tile>(rows[i / COPIES][i % COPIES], k_lane, end);
      }
#pragma unroll
      for (int i = 0; i < 2 * COPIES; ++i) st_shared_128(to + i * 4 * SLICE_BYTES, values[i]);
    }
    k += weights.walk.stride;
    if (k >= weights.walk.depth) k = weights.walk.begin, ++tile, with_x = false;
  }
};

// The ring of a warp. Every stage is one group of copies.
template <class Tile>
struct SliceRing {
  uint32_t stages;  // in shared memory
  int in = 0, out = 0;

  __device__ SliceRing(char* rings)
      : stages(opaque(smem_address(rings) + threadIdx.x / 32 * Tile::RING_BYTES)) {}

  // Asks for one more.
  template <class Slices>
  __device__ __forceinline__ void fill(Slices& slices) {
    if (slices.more()) slices.copy_next(stages + in * STAGE_BYTES);
    copies_commit<Tile::ARCH>();
    in = in + 1 == Tile::NUM_STAGES ? 0 : in + 1;
  }

  // The oldest.
  __device__ __forceinline__ uint32_t wait() {
    if constexpr (Tile::ARCH >= 80) cp_async_wait<Tile::NUM_STAGES - 1>();
    __syncwarp();  // what the other lanes have copied is there as well
    const uint32_t stage = stages + out * STAGE_BYTES;
    out = out + 1 == Tile::NUM_STAGES ? 0 : out + 1;
    return stage;
  }
};
