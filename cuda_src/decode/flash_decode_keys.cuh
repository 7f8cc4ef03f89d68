// The keys and values of a warp in a decode step (flash_decode.cu), loaded from global memory
// straight into registers as mma operands.
//
// A product sums over 16 columns of keys and queries, in any order that is the same for both. So
// each lane loads eight neighbouring columns of its keys at once; four lanes have 32 columns, which
// two products consume. A lane also loads eight neighbouring columns of its values (eight lanes
// have 64), and it will hold the output of these columns. The product with the values needs pairs
// of neighbouring keys, which are made in registers by byte permutations.
#pragma once
#include "../common/words.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/opaque.cuh"
#include "decode_work.cuh"

// The coordinates of lane 4 g + c of a warp. They are read anew each time, so that the compiler
// does not keep offsets in registers.
struct QuadLane {
  int g, c;

  __device__ QuadLane() {
    const int thread = fresh_thread_index();
    g = thread % 32 / 4, c = thread % 4;
  }
};

// The rows of the keys and values of a segment (decode_work.cuh). A lane finds the row of one key
// of a chunk, and the lanes of a fragment get theirs from it by shuffles. Keys that no row sees are
// replaced by one that exists and is seen, because nobody may own the memory of the others.
template <typename T, int KEYS>
struct SegmentRows {
  const FlashDecodeParams& params;
  const Segment& segment;

  // The number of the first key of a chunk.
  __device__ int first_key(int chunk) const {
    return (segment.sequence.begin / KEYS + chunk) * KEYS;
  }

  // Whether new keys, which are in k and v, are in a chunk. A cache of 8 bits has all of them.
  __device__ bool has_new(int chunk) const {
    return sizeof(T) > 1 && params.appends && first_key(chunk) + KEYS > segment.sequence.cached;
  }

  // The place of this lane's key; for a new one, row ~i stands for row i of k and v.
  __device__ RowPlace place(int chunk) const {
    const DecodeSequence& s = segment.sequence;
    const int key = min(max(first_key(chunk) + int(threadIdx.x % KEYS), s.begin), s.length - 1);
    if (sizeof(T) > 1 && params.appends && key >= s.cached)
      return {0, ~(s.first_token + key - s.cached)};
    return place_of(params, segment.batch, key);
  }

  __device__ const T* k_row(RowPlace at) const {
    return sizeof(T) > 1 && at.row < 0 ? row(params.k, params.k_strides, segment.batch, ~at.row)
                                       : row(params.k_cache, params.k_cache_strides,
                                             params.pages.existing(at.page), at.row);
  }
  __device__ const T* v_row(RowPlace at) const {
    return sizeof(T) > 1 && at.row < 0 ? row(params.v, params.v_strides, segment.batch, ~at.row)
                                       : row(params.v_cache, params.v_cache_strides,
                                             params.pages.existing(at.page), at.row);
  }

  // The scale of a key or value of a cache of 8 bits.
  __device__ float scale(const void* scales, const Strides& strides, RowPlace at) const {
    const int page = params.pages.existing(at.page);
    return static_cast<const float*>(scales)[strides.at(page, at.row, segment.kv_head)];
  }

 private:
  __device__ const T* row(const void* data, const Strides& strides, int batch, int row) const {
    return static_cast<const T*>(data) + strides.at(batch, row, segment.kv_head);
  }
};

// The pointer of another lane.
template <typename T>
__device__ __forceinline__ const T* pointer_of(const T* pointer, int lane) {
  const uint64_t address = __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(pointer), lane);
  return reinterpret_cast<const T*>(address);
}

// Keeps ptxas from moving the shuffles and loads of the next row or query before those that come
// first: it would keep more addresses and queries in registers than there are.
__device__ __forceinline__ void keep_order() { __syncwarp(); }

// The columns of a row that a lane has, of LANES lanes beside each other: N in each load. Only the
// last of BLOCKS blocks of 64 columns may be partial. Loads of columns that do not exist read the
// last ones that do, so the addresses are always valid.
template <int LANES, int BLOCKS, typename T, int N, int LOADS>
__device__ __forceinline__ void load_row(Words<T, N> (&to)[LOADS], const T* row, int lane,
                                         int head_dim) {
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const bool whole = (i + 1) * LANES * N <= (BLOCKS - 1) * 64;
    const int column = i * LANES * N + lane * N;
    to[i] = load_words<N, true>(row + (whole ? column : min(column, head_dim - N)));
  }
}

// TILES tiles of 16 keys and values, in BLOCKS blocks of 64 columns. A load has K_WIDTH columns of
// a key or V_WIDTH of a value. `mine` is the row of key number `lane % (16 * TILES)`.
template <typename T, int TILES, int BLOCKS, int K_WIDTH, int V_WIDTH>
struct RowTiles {
  static constexpr int K_LOADS = BLOCKS * 64 / (4 * K_WIDTH);
  static constexpr int V_LOADS = BLOCKS * 64 / (8 * V_WIDTH);
  Words<T, K_WIDTH> k[TILES][2][K_LOADS];     // keys g and g + 8, columns K_WIDTH * (4 i + c)
  Words<T, V_WIDTH> v[TILES][2][2][V_LOADS];  // keys 2c, 2c + 1, those + 8, V_WIDTH * (8 i + g)

  // The first of the eight columns of values, and so of outputs, that a lane has in block j.
  __device__ static int column(int j, int g) {
    constexpr int IN_LOAD = V_WIDTH / 8;
    return j / IN_LOAD * IN_LOAD * 64 + g * V_WIDTH + j % IN_LOAD * 8;
  }

  __device__ void load_k(const T* mine, int head_dim) {
    const QuadLane lane;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        keep_order();
        const T* row = pointer_of(mine, tile * 16 + half * 8 + lane.g);
        load_row<4, BLOCKS>(k[tile][half], row, lane.c, head_dim);
      }
    }
  }

  __device__ void load_v(const T* mine, int head_dim) {
    const QuadLane lane;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          keep_order();
          const T* row = pointer_of(mine, tile * 16 + half * 8 + lane.c * 2 + odd);
          load_row<8, BLOCKS>(v[tile][half][odd], row, lane.g, head_dim);
        }
      }
    }
  }
};

// Tiles of a cache of T.
template <typename T, int TILES, int BLOCKS, int ARCH>
struct KeyTiles : RowTiles<T, TILES, BLOCKS, 8, 8> {
  using Base = RowTiles<T, TILES, BLOCKS, 8, 8>;
  using Base::k;
  using Base::v;

  // s = K Q^T, the accumulators of 16 keys (rows g and g + 8) and 8 queries (columns 2c and 2c + 1)
  // each. The queries lie in shared memory at `q` in the same order as the keys in k: for each i
  // and lane the 16 bytes of query g.
  template <int QUERY_TILES>
  __device__ void scores(float (&s)[QUERY_TILES][TILES][4], uint32_t q) const {
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 2 * BLOCKS; ++i) {
        if (i % 2 == 0) keep_order();
        const uint4 query = ld_shared_128(q + ((n * 2 * BLOCKS + i) * 32 + threadIdx.x % 32) * 16);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const Words<T, 8>& x = k[tile][0][i];
          const Words<T, 8>& y = k[tile][1][i];
          const uint32_t low[4] = {x.words[0], y.words[0], x.words[1], y.words[1]};
          const uint32_t high[4] = {x.words[2], y.words[2], x.words[3], y.words[3]};
          mma_m16n8k16<T, ARCH>(s[n][tile], low, query.x, query.y);
          mma_m16n8k16<T, ARCH>(s[n][tile], high, query.z, query.w);
        }
      }
    }
  }

  // O^T += V^T P^T. o[n][j][t] holds columns 64 j + 8 g + 2t (and + 1 in its second half) of
  // queries 2c and 2c + 1; p[n][tile] holds keys 2c and 2c + 1 (and those + 8 in its second word)
  // of query g.
  template <int QUERY_TILES>
  __device__ void add_weighted(float (&o)[QUERY_TILES][BLOCKS][4][4],
                               const uint32_t (&p)[QUERY_TILES][TILES][2]) const {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const uint32_t x = v[tile][0][0][j].words[t], y = v[tile][0][1][j].words[t];
          const uint32_t z = v[tile][1][0][j].words[t], w = v[tile][1][1][j].words[t];
          const uint32_t a[4] = {__byte_perm(x, y, 0x5410), __byte_perm(x, y, 0x7632),
                                 __byte_perm(z, w, 0x5410), __byte_perm(z, w, 0x7632)};
#pragma unroll
          for (int n = 0; n < QUERY_TILES; ++n)
            mma_m16n8k16<T, ARCH>(o[n][j][t], a, p[n][tile][0], p[n][tile][1]);
        }
      }
    }
  }
};
