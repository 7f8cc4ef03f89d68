// Attention of one query to the keys of a cache. The keys of a head are shared out over `splits`
// blocks, in a block over its warps, in a warp over groups of lanes; each keeps the largest score,
// the sum of the exponentials and the weighted sum of the values, which merge in the end: within a
// block here, of the splits where the output is read.
#pragma once
#include "../ptx/math.cuh"
#include "decode_inputs.cuh"

constexpr int MIN_SPLIT_KEYS = 64;

// How many blocks share the keys of a sequence; no share is empty.
__device__ __forceinline__ int num_splits(int keys, int splits) {
  return min(ceil_div(keys, MIN_SPLIT_KEYS), splits);
}

// exp2(score - maximum), also where there is no score yet.
__device__ __forceinline__ float weight_of(float score, float maximum) {
  return score == -INF ? 0.f : exp2_approx(score - maximum);
}

// What a share of the keys has found; `out` is of COLUMNS columns of the head.
template <int COLUMNS>
struct SoftmaxPart {
  float maximum = -INF;
  float sum = 0.f;
  float out[COLUMNS] = {};

  __device__ void rescale(float new_maximum) {
    const float scale = weight_of(maximum, new_maximum);
    maximum = new_maximum;
    sum *= scale;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) out[i] *= scale;
  }
  __device__ void merge_lanes(int mask) {
    const float other = __shfl_xor_sync(0xffffffffu, maximum, mask);
    rescale(fmaxf(maximum, other));
    sum += __shfl_xor_sync(0xffffffffu, sum, mask);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) out[i] += __shfl_xor_sync(0xffffffffu, out[i], mask);
  }
};

template <int HEAD_DIM>
struct AttentionStorage {
  float out[CONSUMER_WARPS][HEAD_DIM];
  float2 sums[CONSUMER_WARPS];
};

template <typename T, int HEAD_DIM>
struct DecodeAttention {
  static constexpr int COLUMNS = LANE_COLUMNS<T>;
  static constexpr int LANES = HEAD_DIM / COLUMNS;  // of a key
  static constexpr int SLOTS = 32 / LANES;          // keys of a warp at once
  static constexpr int STEP = SLOTS * CONSUMER_WARPS;
  static constexpr int UNROLL = 4;
  using Part = SoftmaxPart<COLUMNS>;

  const DecodeStackParams& params;
  const int layer;
  const int (&keys)[MAX_BATCH];
  const int (&split_keys)[MAX_BATCH];

  // A share of the keys of a head of a sequence.
  struct Unit {
    int pair;        // batch * heads + head
    int count, old;  // keys of the share, and how many of them were there before this launch
    const T *k, *v;  // of the first key
  };
  // What a lane has of the keys of a warp at once.
  struct Chunk {
    uint4 k[UNROLL] = {}, v[UNROLL] = {};
  };
  __device__ Unit unit(int index) const {
    const int pair = quotient(index, params.splits_inverse), split = index - pair * params.splits;
    const int batch = pair < num_pairs() ? quotient(pair, params.heads_inverse) : 0;
    const int head = pair - batch * params.heads, begin = split * split_keys[batch];
    const int all = pair < num_pairs() ? keys[batch] : 0, most = split_keys[batch];
    return {pair, min(all - begin, most), min(all - 1 - begin, most),
            static_cast<const T*>(params.k_cache) + params.k_strides.at(layer, batch, begin, head),
            static_cast<const T*>(params.v_cache) + params.v_strides.at(layer, batch, begin, head)};
  }
  __device__ int num_pairs() const { return params.batch * params.heads; }

  // By a warp: brings the old keys and values of this block's units into L2.
  __device__ void prefetch() const {
    for (int index = blockIdx.x; index < num_pairs() * params.splits; index += gridDim.x) {
      const Unit share = unit(index);
#pragma unroll 1
      for (int key = threadIdx.x % 32; key < share.old; key += 32) {
#pragma unroll 1
        for (int column = 0; column < params.head_dim; column += 128 / sizeof(T)) {
          prefetch_l2(share.k + key * params.k_strides.row + column);
          prefetch_l2(share.v + key * params.v_strides.row + column);
        }
      }
    }
  }

  // The old keys of this warp's first chunk of a unit, which do not depend on other blocks.
  __device__ Chunk old_keys(const Unit& share) const {
    Chunk chunk;
    load(chunk, share, threadIdx.x / 32 * SLOTS, 0, share.old);
    return chunk;
  }

  // `share` is the unit of index blockIdx.x, `chunk` its `old_keys`.
  __device__ void operator()(AttentionStorage<HEAD_DIM>& storage, Unit share, Chunk chunk) const {
#pragma unroll 1
    for (int index = blockIdx.x; index < num_pairs() * params.splits; index += gridDim.x) {
      if (index != blockIdx.x) {
        share = unit(index);
        chunk = old_keys(share);
      }
      if (share.count <= 0) continue;
      store_in_block(storage, warp_part(share, chunk));
      consumers_sync();
      merge_block(storage, index);
      consumers_sync();
    }
  }

 private:
  // The keys from `begin` to `end` of those of the warp that begin with `first`.
  __device__ void load(Chunk& chunk, const Unit& share, int first, int begin, int end) const {
    const int slot = threadIdx.x % 32 / LANES, column = threadIdx.x % LANES * COLUMNS;
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int key = first + i * STEP + slot;
      if (key < begin || key >= end || column >= params.head_dim) continue;
      chunk.k[i] = ld_global_cg_128(share.k + key * params.k_strides.row + column);
      chunk.v[i] = ld_global_cg_128(share.v + key * params.v_strides.row + column);
    }
  }

  // The keys of this warp, each lane with COLUMNS columns; every slot has the same in the end.
  __device__ Part warp_part(const Unit& share, Chunk& chunk) const {
    const int warp = threadIdx.x / 32, slot = threadIdx.x % 32 / LANES;
    const int column = threadIdx.x % LANES * COLUMNS;
    float query[COLUMNS] = {};
    if (column < params.head_dim)
      load_floats(query, params.query + share.pair * params.head_dim + column);
    Part part;
    const int count = share.count;
    int loaded = share.old;
#pragma unroll 1
    for (int first = warp * SLOTS; first < count; first += UNROLL * STEP) {
      load(chunk, share, first, loaded, count);
      loaded = 0;
      float scores[UNROLL], maximum = part.maximum;
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        scores[i] = -INF;
        if (first + i * STEP >= count) continue;  // all of the warp
        scores[i] = 0.f;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) scores[i] += query[j] * column_of<T>(chunk.k[i], j);
#pragma unroll
        for (int mask = 1; mask < LANES; mask *= 2)
          scores[i] += __shfl_xor_sync(0xffffffffu, scores[i], mask);
        const bool valid = first + i * STEP + slot < count;
        scores[i] = valid ? scores[i] * params.scale_log2 : -INF;
        maximum = fmaxf(maximum, scores[i]);
      }
      part.rescale(maximum);
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        if (first + i * STEP >= count) continue;
        const float weight = weight_of(scores[i], maximum);
        part.sum += weight;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) part.out[j] += weight * column_of<T>(chunk.v[i], j);
      }
    }
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) part.merge_lanes(mask);
    return part;
  }

  __device__ void store_in_block(AttentionStorage<HEAD_DIM>& storage, const Part& part) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane < LANES) {
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) storage.out[warp][lane * COLUMNS + i] = part.out[i];
    }
    if (lane == 0) storage.sums[warp] = {part.maximum, part.sum};
  }

  // A thread for each column of the head.
  __device__ void merge_block(const AttentionStorage<HEAD_DIM>& storage, int index) const {
    const int column = threadIdx.x;
    if (column >= params.head_dim) return;
    float maximum = -INF, sum = 0.f, out = 0.f;
#pragma unroll
    for (int warp = 0; warp < CONSUMER_WARPS; ++warp)
      maximum = fmaxf(maximum, storage.sums[warp].x);
#pragma unroll
    for (int warp = 0; warp < CONSUMER_WARPS; ++warp) {
      const float weight = weight_of(storage.sums[warp].x, maximum);
      sum += weight * storage.sums[warp].y;
      out += weight * storage.out[warp][column];
    }
    static_cast<T*>(params.partial_out)[index * params.head_dim + column] =
        from_float<T>(out * rcp_approx(sum));
    if (column == 0) {
      params.partial_sums[2 * index] = maximum;
      params.partial_sums[2 * index + 1] = sum;
    }
  }
};

// The vectors of the projection, the output of attention. If there are less than eight sequences,
// each has several vectors, whose products add up: of 2^bits sequences, vector m is of sequence
// m % 2^bits and has the splits from m / 2^bits on, every 8 / 2^bits-th.
__device__ __forceinline__ int sequence_bits(int batch) { return 32 - __clz(batch - 1); }

// Weighs the splits of each head; as many pieces at once as registers allow.
template <typename T>
__device__ __forceinline__ void load_attended(Fragments& x, const DecodeStackParams& params,
                                              const int (&keys)[MAX_BATCH]) {
  constexpr int COLUMNS = LANE_COLUMNS<T>, PIECES = WIDTH_PIECES<T>;
  constexpr int AT_ONCE = sizeof(T) == 2 ? 2 : 1;
  static_assert(PIECES % AT_ONCE == 0);
  const int bits = sequence_bits(params.batch), m = threadIdx.x % 32 / 4;
  const int n = m & ((1 << bits) - 1);
  const int splits = num_splits(keys[n], params.splits);
  const int pieces = pieces_of_warp(params.width * int(sizeof(T)));
#pragma unroll
  for (int i = 0; i < MAX_PIECES; ++i) x.piece[i] = {0, 0, 0, 0};
#pragma unroll
  for (int first = 0; first < PIECES; first += AT_ONCE) {
    if (first >= pieces) break;
    SoftmaxPart<COLUMNS> parts[AT_ONCE];
    const float2* sums[AT_ONCE];
    const T* out[AT_ONCE];
    bool inside[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int column = piece_offset(first + i) / sizeof(T);
      const int head = quotient(column, params.head_dim_inverse);
      const int unit = (n * params.heads + head) * params.splits;
      inside[i] = column < params.width && n < params.batch;
      sums[i] = reinterpret_cast<const float2*>(params.partial_sums) + unit;
      out[i] = static_cast<const T*>(params.partial_out) + (unit - head) * params.head_dim + column;
    }
#pragma unroll 1
    for (int split = m >> bits; split < splits; split += MAX_BATCH >> bits) {
      float2 found[AT_ONCE];
      uint4 values[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        found[i] = {-INF, 0.f};
        values[i] = {0, 0, 0, 0};
        if (!inside[i]) continue;
        found[i] = ld_global_cg(sums[i] + split);
        values[i] = ld_global_cg_128(out[i] + split * params.head_dim);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        parts[i].rescale(fmaxf(parts[i].maximum, found[i].x));
        const float weight = weight_of(found[i].x, parts[i].maximum) * found[i].y;
        parts[i].sum += weight;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) parts[i].out[j] += weight * column_of<T>(values[i], j);
      }
    }
    float maximum[AT_ONCE], scale[AT_ONCE], sum[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) maximum[i] = parts[i].maximum;
#pragma unroll 1
    for (int mask = 4 << bits; mask < 32; mask *= 2) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(0xffffffffu, maximum[i], mask));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      scale[i] = weight_of(parts[i].maximum, maximum[i]);
      sum[i] = scale[i] * parts[i].sum;
    }
#pragma unroll 1
    for (int mask = 4 << bits; mask < 32; mask *= 2) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], mask);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float share = inside[i] && splits ? scale[i] * rcp_approx(sum[i]) : 0.f;
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) parts[i].out[j] *= share;
      x.piece[first + i] = to_piece<T>(parts[i].out);
    }
  }
}
