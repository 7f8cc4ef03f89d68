// The keys and values of a warp in a decode step (flash_decode_step.cuh), loaded from global memory
// straight into registers as mma operands.
//
// A product sums over 16 columns of keys and queries, in any order that is the same for both. So
// each lane loads eight neighbouring columns of its keys at once; four lanes have 32 columns, which
// two products consume. A lane also loads eight neighbouring columns of its values (eight lanes
// have 64), and it will hold the output of these columns. The product with the values needs pairs
// of neighbouring keys, which are made in registers by byte permutations.
#pragma once
#include "../attention/params.cuh"
#include "../common/words.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/opaque.cuh"

// The coordinates of lane 4 g + c of a warp. They are read anew each time, so that the compiler
// does not keep offsets in registers.
struct QuadLane {
  int g, c;

  __device__ QuadLane() {
    const int thread = fresh_thread_index();
    g = thread % 32 / 4, c = thread % 4;
  }
};

// The keys and values of a head: the old ones in the cache, or the new tokens.
template <typename T>
struct KeyRows {
  const T *k, *v;  // the first row of each
  int k_stride, v_stride;
  int count;  // at least 1

  __device__ KeyRows(const void* k, const void* v, const Strides& k_strides,
                     const Strides& v_strides, int batch, int head, int count)
      : k(static_cast<const T*>(k) + k_strides.at(batch, 0, head)),
        v(static_cast<const T*>(v) + v_strides.at(batch, 0, head)),
        k_stride(k_strides.row),
        v_stride(v_strides.row),
        count(count) {}

  __device__ const T* k_row(int i) const { return k + int64_t(min(i, count - 1)) * k_stride; }
  __device__ const T* v_row(int i) const { return v + int64_t(min(i, count - 1)) * v_stride; }
};

// TILES tiles of 16 keys and values, in BLOCKS blocks of 64 columns, of which only the last may be
// partial. Loads of rows and columns that do not exist read the last ones that do, so the addresses
// are always valid, and a key that no query sees enters the products with weight 0.
template <typename T, int TILES, int BLOCKS, int ARCH>
struct KeyTiles {
  using Eight = Words<T, 8>;
  Eight k[TILES][2][2 * BLOCKS];  // keys g and g + 8, columns 32 i + 8 c
  Eight v[TILES][2][2][BLOCKS];   // keys 2c, 2c + 1, those + 8, columns 64 j + 8 g

  // Loads the keys from `first` on.
  __device__ void load_k(const KeyRows<T>& rows, int first, int head_dim) {
    const QuadLane lane;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* row = rows.k_row(first + tile * 16 + half * 8 + lane.g);
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) {
          const int column = i * 32 + lane.c * 8;
          k[tile][half][i] = load_words<8, true>(
              row + (i < 2 * (BLOCKS - 1) ? column : min(column, head_dim - 8)));
        }
      }
    }
  }

  __device__ void load_v(const KeyRows<T>& rows, int first, int head_dim) {
    const QuadLane lane;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const T* row = rows.v_row(first + tile * 16 + half * 8 + lane.c * 2 + odd);
#pragma unroll
          for (int j = 0; j < BLOCKS; ++j) {
            const int column = j * 64 + lane.g * 8;
            v[tile][half][odd][j] =
                load_words<8, true>(row + (j < BLOCKS - 1 ? column : min(column, head_dim - 8)));
          }
        }
      }
    }
  }

  // Adds K Q^T to s, the accumulators of 16 keys (rows g and g + 8) and 8 queries (columns 2c and
  // 2c + 1). The queries lie in shared memory at `q` in the same order as the keys in k: for each i
  // and lane the 16 bytes of query g.
  __device__ void scores(float (&s)[TILES][4], uint32_t q) const {
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
      const uint4 query = ld_shared_128(q + (i * 32 + threadIdx.x % 32) * 16);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const Eight &x = k[tile][0][i], &y = k[tile][1][i];
        const uint32_t low[4] = {x.words[0], y.words[0], x.words[1], y.words[1]};
        const uint32_t high[4] = {x.words[2], y.words[2], x.words[3], y.words[3]};
        mma_m16n8k16<T, ARCH>(s[tile], low, query.x, query.y);
        mma_m16n8k16<T, ARCH>(s[tile], high, query.z, query.w);
      }
    }
  }

  // O^T += V^T P^T. o[j][t] holds columns 64 j + 8 g + 2t (and + 1 in its second half) of queries
  // 2c and 2c + 1; p[tile] holds keys 2c and 2c + 1 (and those + 8 in its second word) of query g.
  __device__ void add_weighted(float (&o)[BLOCKS][4][4], const uint32_t (&p)[TILES][2]) const {
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
          mma_m16n8k16<T, ARCH>(o[j][t], a, p[tile][0], p[tile][1]);
        }
      }
    }
  }
};
