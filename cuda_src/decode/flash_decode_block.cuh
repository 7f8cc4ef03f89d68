// A block of a decode step of attention (flash_decode.cu, whose comment says how it works).
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/dependent_launch.cuh"
#include "flash_decode_narrow.cuh"
#include "flash_decode_rows.cuh"
#include "flash_decode_softmax.cuh"

// With a cache of 8 bits, to_range_f16() scales each query into the range of float16; units[row] is
// the power of two that undoes it in the scores.
template <int KIND, int ROWS>
struct QueryUnits {
  float units[ROWS];
};
template <int ROWS>
struct QueryUnits<SAME, ROWS> {};

// RESULTS is the number of rows of which the warps store results at once.
template <int KIND, int HEAD_DIM, int ROWS, int RESULTS = 8>
struct DecodeStorage : QueryUnits<KIND, ROWS> {
  uint4 q[ROWS / 8][HEAD_DIM / 32][32];  // the queries, in the order of KeyTiles::scores
  DecodePart<HEAD_DIM, RESULTS> warps[NUM_WARPS];
  QueryRow rows[ROWS];
  Segment segments[SEGMENTS];
  int rounds[NUM_WARPS];  // first_segment()
  bool last[3];           // finish_units()
};

// The number of blocks on a multiprocessor. Together they have more than 64 KB of keys and values
// on their way, which covers the latency of memory.
__host__ __device__ constexpr int decode_blocks(int head_dim, int rows) {
  return head_dim <= 128 && rows == 8 ? 3 : 2;
}

// KIND is that of the cache (narrow.cuh).
template <typename T, int KIND, int HEAD_DIM, int ROWS, int ARCH, int RESULTS = 8>
struct DecodeBlock : DecodeRows<T, HEAD_DIM, ROWS> {
  static_assert(HEAD_DIM % 64 == 0 && ROWS % 8 == 0, "columns come in 64s, rows in 8s");
  static constexpr bool NARROW = KIND != SAME;
  static constexpr int BLOCKS = HEAD_DIM / 64;
  static constexpr int TILES = NARROW || HEAD_DIM == 64 ? 2 : 1, KEYS = TILES * 16;
  static constexpr int QUERY_TILES = ROWS / 8;
  using Storage = DecodeStorage<KIND, HEAD_DIM, ROWS, RESULTS>;
  using Product = typename Choose<NARROW, half_t, T>::Type;  // of the tensor cores
  using Tiles = typename Choose<NARROW, NarrowTiles<KIND, TILES, BLOCKS, ARCH>,
                                KeyTiles<T, TILES, BLOCKS, ARCH>>::Type;
  using Rows = SegmentRows<typename Choose<NARROW, uint8_t, T>::Type, KEYS>;
  using Range = ValueRange<KIND>;

  using Base = DecodeRows<T, HEAD_DIM, ROWS>;
  using Base::params;
  Storage& storage;

  // Queries, and what the options need of them, to shared memory.
  __device__ void stage_queries(const Segment& s) const {
    if constexpr (NARROW)
      stage_in_range(s);
    else
      stage_as_they_are(s);
    if (const int i = threadIdx.x; i < ROWS) storage.rows[i] = this->query_row(s, i);
  }

  __device__ __forceinline__ void stage_as_they_are(const Segment& s) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < QUERY_TILES * HEAD_DIM; i += DECODE_THREADS) {
      const int row = i / HEAD_DIM * 8 + i % 32 / 4, column = i % HEAD_DIM / 32 * 32 + i % 4 * 8;
      uint4 eight = {0, 0, 0, 0};
      if (row < s.rows && column < params.head_dim)
        eight = *reinterpret_cast<const uint4*>(static_cast<const T*>(params.q) +
                                                this->offset(params.q_strides, s, row) + column);
      storage.q[i / HEAD_DIM][i % HEAD_DIM / 32][i % 32] = eight;
    }
  }

  // A warp has a row at a time, eight columns a lane.
  __device__ __forceinline__ void stage_in_range(const Segment& s) const {
    const int column = threadIdx.x % 32 * 8;
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < ROWS; row += NUM_WARPS) {
      float values[8] = {};
      if (row < s.rows && column < params.head_dim) {
        const T* q =
            static_cast<const T*>(params.q) + this->offset(params.q_strides, s, row) + column;
        const Words<T, 8> words = load_words<8>(q);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = words.at(i);
      }
      float unit;
      const uint4 eight = to_range_f16<ARCH>(values, unit);
      if (column < HEAD_DIM)
        storage.q[row / 8][column / 64 * 2 + column / 8 % 2][row % 8 * 4 + column / 16 % 4] = eight;
      if (column == 0) storage.units[row] = unit;
    }
  }

  // The new keys and values of a head to the cache, by the last warp of the one block that has the
  // end of the keys, behind its own work. Places that do not exist are left alone.
  __device__ __forceinline__ void append(const Segment& s) const {
    const bool has_new = params.appends && s.first_row == 0 && s.part == s.parts - 1;
    const int thread = fresh_thread_index(), column = thread % 32 * 8;
    if (!has_new || thread / 32 != NUM_WARPS - 1 || column >= params.head_dim) return;
#pragma unroll 1
    for (int token = 0; token < s.sequence.tokens; ++token) {
      const int key = s.sequence.position + token, row = s.sequence.first_token + token;
      if (key < 0 || key >= params.pages.capacity) continue;
      const RowPlace place = place_of(params, s.batch, key);
      if (!params.pages.has(place.page)) continue;
      const auto load = [&](const void* from, const Strides& strides) {
        return load_words<8>(static_cast<const T*>(from) + strides.at(s.batch, row, s.kv_head) +
                             column);
      };
      const auto store = [&](void* to, const Strides& strides, const Words<T, 8>& eight) {
        store_words(static_cast<T*>(to) + strides.at(place.page, place.row, s.kv_head) + column,
                    eight);
      };
      const Words<T, 8> k = load(params.k, params.k_strides), v = load(params.v, params.v_strides);
      store(params.k_cache, params.k_cache_strides, k);
      store(params.v_cache, params.v_cache_strides, v);
    }
  }

  // The results of all warps to shared memory, eight rows after the other, and from there, merged,
  // to out or to the part.
  __device__ __forceinline__ void finish(const Segment& s,
                                         const float (&o)[QUERY_TILES][BLOCKS][4][4],
                                         const QueryPair<TILES> (&queries)[QUERY_TILES],
                                         Range range) const {
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
      if (n > 0) __syncthreads();  // the rows before have been merged
      store_warp(0, o[n], queries[n], range.out_factor());
      __syncthreads();  // the results of all warps are written
#pragma unroll 1
      for (int i = threadIdx.x * 4; i < 8 * HEAD_DIM; i += 4 * DECODE_THREADS) {
        const int row = i / HEAD_DIM, column = i % HEAD_DIM;
        if (n * 8 + row >= s.rows) break;
        float out[4];
        const Sum sum = merge_warps(row, column, out);
        this->put(s, n * 8 + row, column, out, sum);
      }
    }
  }

  // Eight rows of this warp to shared memory, from row `first` on.
  __device__ __forceinline__ void store_warp(int first, const float (&o)[BLOCKS][4][4],
                                             const QueryPair<TILES>& queries, float factor) const {
    const QuadLane lane;
    DecodePart<HEAD_DIM, RESULTS>& to = storage.warps[fresh_thread_index() / 32];
#pragma unroll
    for (int query = 0; query < 2; ++query) {
      const int row = first + lane.c * 2 + query;
      const Sum sum = queries.sum(query);
      if (lane.g == 0) to.sums[row] = sum;
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
        float4* eight = reinterpret_cast<float4*>(&to.out[row][Tiles::column(j, lane.g)]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float (&low)[4] = o[j][2 * i], (&high)[4] = o[j][2 * i + 1];
          eight[i] = make_float4(low[query] * factor, low[2 + query] * factor, high[query] * factor,
                                 high[2 + query] * factor);
        }
      }
    }
  }

  // Merges four columns of a row, and returns their sum.
  __device__ __forceinline__ Sum merge_warps(int row, int column, float (&out)[4]) const {
    Sum all = {-INF, 0.f};
#pragma unroll
    for (int i = 0; i < NUM_WARPS; ++i) all.max = fmaxf(all.max, storage.warps[i].sums[row].max);
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] = 0.f;
#pragma unroll
    for (int i = 0; i < NUM_WARPS; ++i) {
      const Sum sum = storage.warps[i].sums[row];
      const float weight = weight_of(sum.max, all.max);
      all.total += weight * sum.total;
      add_weighted(out, weight,
                   *reinterpret_cast<const uint4*>(&storage.warps[i].out[row][column]));
    }
    return all;
  }

  // The keys of this warp in a segment, of which begin() has loaded the first.
  __device__ __forceinline__ void attend(const Segment& s, Tiles& tiles, RowPlace next,
                                         float (&o)[QUERY_TILES][BLOCKS][4][4],
                                         QueryPair<TILES> (&queries)[QUERY_TILES],
                                         Range& range) const {
    const Rows rows{params, s};
    const int stop = s.chunk_end;
#pragma unroll 1
    for (int chunk = s.chunk + fresh_thread_index() / 32; chunk < stop; chunk += NUM_WARPS) {
      const int ahead = chunk + NUM_WARPS;
      float scores[QUERY_TILES][TILES][4] = {};
      uint32_t p[QUERY_TILES][TILES][2];
      if constexpr (NARROW)
        tiles.scores(scores, smem_address(storage.q), storage.units);
      else
        tiles.scores(scores, smem_address(storage.q));
      const RowPlace place = next;
      if (ahead < stop) {
        load_k(tiles, rows, place);
        if (ahead + NUM_WARPS < stop) next = rows.place(ahead + NUM_WARPS);
      }
      const int first = rows.first_key(chunk);
      const bool masked = first < s.inner_begin || first + KEYS > s.inner_end;
      float shift = 1.f;
      if constexpr (NARROW) shift = range.include(tiles.v_scale);
#pragma unroll
      for (int n = 0; n < QUERY_TILES; ++n) {
        float rescale[2];
        apply_score(scores[n], params, s, storage.rows + n * 8, first, masked);
        queries[n].update(scores[n], rescale);
        if constexpr (NARROW) {
          tiles.scale_weights(scores[n], range);
          rescale[0] *= shift, rescale[1] *= shift;
        }
        pack_weights<Product, ARCH>(scores[n], p[n]);
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
#pragma unroll
          for (int i = 0; i < 16; ++i) o[n][j][i / 4][i % 4] *= rescale[i % 2];
        }
      }
      tiles.add_weighted(o, p);
      if (ahead < stop) load_v(tiles, rows, place);
    }
  }

  __device__ __forceinline__ void load_k(Tiles& tiles, const Rows& rows, RowPlace at) const {
    tiles.load_k(rows.k_row(at), params.head_dim);
    if constexpr (NARROW) tiles.k_scale = rows.scale(params.k, params.k_strides, at);
  }

  __device__ __forceinline__ void load_v(Tiles& tiles, const Rows& rows, RowPlace at) const {
    tiles.load_v(rows.v_row(at), params.head_dim);
    if constexpr (NARROW) tiles.v_scale = rows.scale(params.v, params.v_strides, at);
  }

  // Brings the first chunk of this warp in a segment into L2, of a cache to which the kernel before
  // may still append.
  __device__ __forceinline__ void prefetch(const Segment& s) const {
    static_assert(KEYS == 32, "a lane has a key");
    const Rows rows{params, s};
    const int chunk = s.chunk + threadIdx.x / 32;
    if (chunk >= s.chunk_end) return;
    const RowPlace place = rows.place(chunk);
    for (int column = 0; column < params.head_dim; column += 128) {
      prefetch_l2(rows.k_row(place) + column);
      prefetch_l2(rows.v_row(place) + column);
    }
  }

  // Whether new keys are in the first chunk of this warp in a segment.
  __device__ bool starts_new(const Segment& s) const {
    return Rows{params, s}.has_new(s.chunk + threadIdx.x / 32);
  }

  // Loads the first chunk of this warp in a segment.
  __device__ __forceinline__ RowPlace begin(const Segment& s, Tiles& tiles) const {
    const Rows rows{params, s};
    const int stop = s.chunk_end;
    const int chunk = s.chunk + fresh_thread_index() / 32;
    RowPlace next = {0, 0};
    if (chunk >= stop) return next;
    const RowPlace place = rows.place(chunk);
    load_k(tiles, rows, place);
    load_v(tiles, rows, place);
    if (chunk + NUM_WARPS < stop) next = rows.place(chunk + NUM_WARPS);
    return next;
  }
};

template <class Block>
__device__ __forceinline__ void decode_step(const FlashDecodeParams& params,
                                            typename Block::Storage& storage) {
  constexpr int ROWS = Block::QUERY_TILES * 8, KEYS = Block::KEYS;
  launch_next_kernel();
  const Block block{{params}, storage};
  if (!first_segment<ROWS, KEYS>(params, storage.segments[0], storage.rounds)) {
    if (blockIdx.x == 0) wait_for_previous_kernel();  // one block of a grid must, the others may
    return;
  }
  if constexpr (Block::NARROW) block.prefetch(storage.segments[0]);
  typename Block::Tiles tiles;
  if (!params.appends || block.starts_new(storage.segments[0])) wait_for_previous_kernel();
  RowPlace next = block.begin(storage.segments[0], tiles);
  wait_for_previous_kernel();
  int number = 0;
#pragma unroll 1
  for (;;) {
    const Segment& s = storage.segments[number];
    Segment& following = storage.segments[number_after(number)];
    block.stage_queries(s);
    if (threadIdx.x == 0) set_next_segment<ROWS, KEYS>(following, params, s);
    __syncthreads();  // the queries and the next segment are in shared memory

    QueryPair<Block::TILES> queries[Block::QUERY_TILES];
    float o[Block::QUERY_TILES][Block::BLOCKS][4][4] = {};
    typename Block::Range range;
    block.attend(s, tiles, next, o, queries, range);
    if (following.batch >= 0) next = block.begin(following, tiles);
    block.finish(s, o, queries, range);
    if constexpr (!Block::NARROW) block.append(s);
    if (following.batch < 0) break;
    number = number_after(number);
  }
  block.finish_units(storage.segments, storage.last, number);
}
