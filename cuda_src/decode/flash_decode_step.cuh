// A decode step of attention, the body of flash_decode.cu and flash_decode_cluster.cu. The new
// tokens of each sequence (up to eight) enter its cache of keys and values, and attend to all that
// is then in the cache. With t one of the new tokens of sequence b:
//
//   k_cache[b, positions[b] + t] = k[b, t], and v_cache likewise
//   out[b, t, h] = softmax(scale q[b, t, h] K^T) V    K and V up to key positions[b] + t
//
// FlashDecodeParams has the arrays with their shapes. It is one launch; the host does not know the
// positions.
//
// Division of work. A cluster of CLUSTER blocks has one key head of one sequence and up to eight of
// its queries, which are those of the query heads that share the keys, token by token. If there are
// few heads and many keys, several clusters have the same queries, and each a split of the keys.
// The keys are cut into chunks of TILES * 16. The warps of all these blocks take the chunks
// one after the other; the last chunk is the new tokens.
//
// A warp computes with one chunk while it loads the next one to registers (flash_decode_keys.cuh).
// Keys are the rows of its tensor-core products, and queries the eight columns. Each warp has a
// softmax of its own. In the end the results are merged (flash_decode_merge.cuh): those of warps in
// the shared memory of their block, those of blocks in the shared memory of the cluster, and those
// of splits in global memory, by the cluster that finishes last.
//
// Overlap. The old keys can be loaded while the kernel that computes the new ones still runs
// (dependent_launch.cuh).
//
// Why nothing is overwritten while it is read. One warp writes the new keys and values to the
// cache, behind the old ones; all warps read the new ones from k and v instead. In shared memory a
// barrier lies between each writing and reading. No cluster waits for another: a split counts
// itself in, and the last one finds the results of all others complete.
//
// Source: Flash-Decoding, pytorch.org/blog/flash-decoding.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/dependent_launch.cuh"
#include "../ptx/stmatrix.cuh"
#include "flash_decode_keys.cuh"
#include "flash_decode_merge.cuh"
#include "params.cuh"

// The softmax of queries 2c and 2c + 1 in lane 4 g + c. `total` stays the sum over the lane's own
// keys until the end; the maximum is that of the warp.
template <int TILES>
struct QueryPair {
  float max[2] = {-INF, -INF};
  float total[2] = {0.f, 0.f};

  // Turns scores into weights, packed as an operand of the product with the values. Each query sees
  // the first `visible` keys of the chunk. rescale is the factor for the outputs so far.
  template <typename T, int ARCH>
  __device__ void update(float (&s)[TILES][4], uint32_t (&p)[TILES][2], float (&rescale)[2],
                         const int (&visible)[2], float scale_log2) {
    const QuadLane lane;
#pragma unroll
    for (int query = 0; query < 2; ++query) {
      float new_max = max[query];
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i) {
        float& score = s[i / 2][i % 2 * 2 + query];
        score = i * 8 + lane.g < visible[query] ? score * scale_log2 : -INF;
        new_max = fmaxf(new_max, score);
      }
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2)
        new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, mask));
      rescale[query] = weight_of(max[query], new_max);
      max[query] = new_max;
      total[query] *= rescale[query];
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i) {
        float& score = s[i / 2][i % 2 * 2 + query];
        score = weight_of(score, new_max);
        total[query] += score;
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      const float* weights = s[i / 2] + i % 2 * 2;
      p[i / 2][i % 2] = movmatrix_trans(pack<T, ARCH>(weights[0], weights[1]));
    }
  }
};

// The number of blocks on a multiprocessor. Together they have more than 32 KB of keys in flight,
// and as much of values, which covers the latency of memory.
__host__ __device__ constexpr int decode_blocks(int head_dim) { return head_dim <= 128 ? 3 : 2; }

// n / divisor. Most divisors are 1 (one group of queries, one query a head), and the branch is
// cheaper than a division.
__device__ __forceinline__ int quotient(int n, int divisor) {
  return divisor == 1 ? n : n / divisor;
}

template <typename T, int HEAD_DIM, int CLUSTER, int ARCH>
__device__ __forceinline__ void decode_step(const FlashDecodeParams& params) {
  static_assert(HEAD_DIM % 64 == 0, "columns come in 64s");
  constexpr int BLOCKS = HEAD_DIM / 64, TILES = HEAD_DIM == 64 ? 2 : 1, KEYS = TILES * 16;
  using Tiles = KeyTiles<T, TILES, BLOCKS, ARCH>;
  __shared__ DecodeStorage<HEAD_DIM> storage;
  launch_next_kernel();

  // ---- which queries ----
  const int rank = CLUSTER == 1 ? 0 : cluster_rank(), warp = threadIdx.x / 32;
  const int group = params.group, all_rows = params.seqlen * group;
  const int row_blocks = ceil_div(all_rows, ROWS);
  const int cluster = blockIdx.x / CLUSTER, unit = quotient(cluster, params.splits);
  const int pair = quotient(unit, row_blocks);
  const int first_row = (unit - pair * row_blocks) * ROWS, rows = min(ROWS, all_rows - first_row);
  const int batch = pair / params.heads_kv, kv_head = pair - batch * params.heads_kv;
  const auto offset = [&](const Strides& strides, int row) {
    const int token = quotient(first_row + row, group);
    return strides.at(batch, token, kv_head * group + first_row + row - token * group);
  };

  // ---- which keys: chunks of the cache, then the new ones ----
  const int position = params.positions[batch];
  const int old = min(max(position, 0), params.max_length), old_chunks = ceil_div(old, KEYS);
  constexpr int WARPS = NUM_WARPS * CLUSTER;
  const int splits = splits_of(old_chunks / WARPS, params.splits);
  const int split = cluster - unit * params.splits;
  if (split >= splits) return;
  const KeyRows<T> new_rows(params.k, params.v, params.k_strides, params.v_strides, batch, kv_head,
                            params.seqlen);
  const KeyRows<T> old_rows(params.k_cache, params.v_cache, params.k_cache_strides,
                            params.v_cache_strides, batch, kv_head, old);
  const auto rows_of = [&](int chunk) { return chunk < old_chunks ? old_rows : new_rows; };
  const auto first_of = [&](int chunk) { return chunk < old_chunks ? chunk * KEYS : 0; };
  const int step = WARPS * splits;
  int chunk = (warp * CLUSTER + rank) * splits + split;
  Tiles tiles;
  if (chunk >= old_chunks) wait_for_previous_kernel();  // it computes the new keys
  if (chunk <= old_chunks) {
    tiles.load_k(rows_of(chunk), first_of(chunk), params.head_dim);
    tiles.load_v(rows_of(chunk), first_of(chunk), params.head_dim);
  }
  wait_for_previous_kernel();

  // ---- queries to shared memory, new keys and values to the cache ----
#pragma unroll 1
  for (int i = threadIdx.x; i < HEAD_DIM; i += DECODE_THREADS) {
    const int row = i % 32 / 4, column = i / 32 * 32 + i % 4 * 8;
    uint4 eight = {0, 0, 0, 0};
    if (row < rows && column < params.head_dim)
      eight = *reinterpret_cast<const uint4*>(static_cast<const T*>(params.q) +
                                              offset(params.q_strides, row) + column);
    storage.q[i / 32][i % 32] = eight;
  }
  const bool writer = split == 0 && rank == CLUSTER - 1 && warp == NUM_WARPS - 1;
  if (const int column = threadIdx.x % 32 * 8;
      writer && first_row == 0 && column < params.head_dim) {
#pragma unroll 1
    for (int token = 0; token < params.seqlen; ++token) {
      const int place = position + token;
      if (place < 0 || place >= params.max_length) continue;
      T* k = static_cast<T*>(params.k_cache) + params.k_cache_strides.at(batch, place, kv_head);
      T* v = static_cast<T*>(params.v_cache) + params.v_cache_strides.at(batch, place, kv_head);
      const Words<T, 8> new_k = load_words<8>(new_rows.k_row(token) + column);
      const Words<T, 8> new_v = load_words<8>(new_rows.v_row(token) + column);
      store_words(k + column, new_k);
      store_words(v + column, new_v);
    }
  }
  __syncthreads();  // the queries are complete in shared memory

  // ---- the keys of this warp ----
  QueryPair<TILES> queries;
  float o[BLOCKS][4][4] = {};
#pragma unroll 1
  for (; chunk <= old_chunks; chunk += step) {
    const bool last = chunk + step > old_chunks;
    int visible[2] = {old - chunk * KEYS, old - chunk * KEYS};
    if (chunk == old_chunks) {
      const QuadLane lane;
#pragma unroll
      for (int query = 0; query < 2; ++query)
        visible[query] = min(quotient(first_row + lane.c * 2 + query, group) + 1, params.seqlen);
    }
    float s[TILES][4] = {}, rescale[2];
    uint32_t p[TILES][2];
    tiles.scores(s, smem_address(storage.q));
    if (!last) tiles.load_k(rows_of(chunk + step), first_of(chunk + step), params.head_dim);
    queries.template update<T, ARCH>(s, p, rescale, visible, params.scale_log2);
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
#pragma unroll
      for (int i = 0; i < 16; ++i) o[j][i / 4][i % 4] *= rescale[i % 2];
    }
    tiles.add_weighted(o, p);
    if (!last) tiles.load_v(rows_of(chunk + step), first_of(chunk + step), params.head_dim);
  }

  // ---- into shared memory ----
  const QuadLane lane;
#pragma unroll
  for (int query = 0; query < 2; ++query) {
    float total = queries.total[query];
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) total += __shfl_xor_sync(0xffffffffu, total, mask);
    const int row = lane.c * 2 + query;
    if (row >= rows) continue;
    if (lane.g == 0) storage.sums[warp][row] = {queries.max[query], total};
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
      float4* to = reinterpret_cast<float4*>(&storage.out[warp][row][j * 64 + lane.g * 8]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float (&low)[4] = o[j][2 * i], (&high)[4] = o[j][2 * i + 1];
        to[i] = make_float4(low[query], low[2 + query], high[query], high[2 + query]);
      }
    }
  }
  __syncthreads();  // the results of all warps are written

  // ---- merge the warps, the blocks, the splits; write ----
  auto* const parts =
      static_cast<DecodePart<HEAD_DIM>*>(params.parts) + int64_t(unit) * params.splits;
  const auto write = [&](int row, int column, float out, Sum sum) {
    if (column >= params.head_dim) return;
    static_cast<T*>(params.out)[offset(params.out_strides, row) + column] =
        from_float<T>(sum.total == 0.f ? 0.f : out * rcp_approx(sum.total));
  };
  const auto finish = [&](int row, int column, float out, Sum sum) {
    if (splits == 1) return write(row, column, out, sum);
    parts[split].out[row][column] = out;
    if (column == 0) parts[split].sums[row] = sum;
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * HEAD_DIM; i += DECODE_THREADS) {
    const int row = i / HEAD_DIM, column = i % HEAD_DIM;
    Sum sum;
    const float out = merge<NUM_WARPS>(
        sum, [&](int part) { return storage.sums[part][row]; },
        [&](int part) { return storage.out[part][row][column]; });
    if constexpr (CLUSTER == 1) {
      finish(row, column, out, sum);
    } else {
      storage.out[0][row][column] = out;
      if (column == 0) storage.merged[row] = sum;
    }
  }
  if constexpr (CLUSTER > 1) {
    cluster_sync();  // all blocks have merged their warps
#pragma unroll 1
    for (int i = rank * DECODE_THREADS + threadIdx.x; i < rows * HEAD_DIM;
         i += CLUSTER * DECODE_THREADS) {
      const int row = i / HEAD_DIM, column = i % HEAD_DIM;
      Sum sum;
      const float out = merge<CLUSTER>(
          sum, [&](int part) { return *cluster_shared(&storage.merged[row], part); },
          [&](int part) { return *cluster_shared(&storage.out[0][row][column], part); });
      finish(row, column, out, sum);
    }
  }
  CLUSTER > 1 ? cluster_sync() : __syncthreads();  // no thread reads this shared memory any more
  if (splits == 1) return;
  if (is_last_split<CLUSTER>(storage.last, params.counters + unit, splits, rank))
    merge_splits<CLUSTER>(storage, parts, splits, rows, rank, write);
}
