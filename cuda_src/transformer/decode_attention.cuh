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

  // A share of the keys of a head of a sequence.
  struct Unit {
    int batch, head, begin, end;
  };
  __device__ Unit unit(int index) const {
    const int split = index % params.splits, pair = index / params.splits;
    Unit result = {pair / params.heads, pair % params.heads, 0, 0};
    const int all = keys[result.batch], shares = num_splits(all, params.splits);
    if (split < shares) {
      const int share = ceil_div(all, shares);
      result.begin = split * share;
      result.end = min(all, result.begin + share);
    }
    return result;
  }
  __device__ int num_units() const { return params.batch * params.heads * params.splits; }

  // Brings the old keys and values of this block's units into L2.
  __device__ void prefetch() const {
    for (int index = blockIdx.x; index < num_units(); index += gridDim.x) {
      const Unit share = unit(index);
      for (int key = share.begin + threadIdx.x; key < share.end; key += CONSUMERS) {
        for (int column = 0; column < params.head_dim; column += 128 / sizeof(T)) {
          prefetch_l2(row_of(params.k_cache, params.k_strides, share, key) + column);
          prefetch_l2(row_of(params.v_cache, params.v_strides, share, key) + column);
        }
      }
    }
  }

  __device__ void operator()(AttentionStorage<HEAD_DIM>& storage) const {
    for (int index = blockIdx.x; index < num_units(); index += gridDim.x) {
      const Unit share = unit(index);
      if (share.begin == share.end) continue;
      store_in_block(storage, warp_part(share));
      consumers_sync();
      merge_block(storage, index);
      consumers_sync();
    }
  }

 private:
  __device__ const T* row_of(const void* cache, const CacheStrides& strides, const Unit& share,
                             int key) const {
    return static_cast<const T*>(cache) + strides.at(layer, share.batch, key, share.head);
  }

  // The keys of this warp, each lane with COLUMNS columns; every slot has the same in the end.
  __device__ Part warp_part(const Unit& share) const {
    const int slot = threadIdx.x / LANES, column = threadIdx.x % LANES * COLUMNS;
    const bool inside = column < params.head_dim;
    float query[COLUMNS] = {};
    if (inside) {
      const int first = share.batch * params.width + share.head * params.head_dim;
      load_floats(query, params.query + first + column);
    }
    Part part;
    for (int key = share.begin + slot; key < share.end + slot; key += UNROLL * STEP) {
      uint4 k[UNROLL], v[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        k[i] = v[i] = {0, 0, 0, 0};
        if (key + i * STEP >= share.end || !inside) continue;
        k[i] = ld_global_cg_128(row_of(params.k_cache, params.k_strides, share, key + i * STEP) +
                                column);
        v[i] = ld_global_cg_128(row_of(params.v_cache, params.v_strides, share, key + i * STEP) +
                                column);
      }
      float scores[UNROLL], maximum = part.maximum;
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        scores[i] = 0.f;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) scores[i] += query[j] * column_of<T>(k[i], j);
#pragma unroll
        for (int mask = 1; mask < LANES; mask *= 2)
          scores[i] += __shfl_xor_sync(0xffffffffu, scores[i], mask);
        scores[i] = key + i * STEP < share.end ? scores[i] * params.scale_log2 : -INF;
        maximum = fmaxf(maximum, scores[i]);
      }
      part.rescale(maximum);
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        const float weight = weight_of(scores[i], maximum);
        part.sum += weight;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) part.out[j] += weight * column_of<T>(v[i], j);
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
        from_float<T>(out / sum);
    if (column == 0) {
      params.partial_sums[2 * index] = maximum;
      params.partial_sums[2 * index + 1] = sum;
    }
  }
};

// The output of attention as the vectors of the projection: the splits of each head merged. What
// row_dot needs without mma leaves registers for one at a time.
template <typename T, int ARCH>
__device__ __forceinline__ void load_attended(Fragments& x, const DecodeStackParams& params,
                                              const int (&keys)[MAX_BATCH]) {
  constexpr int COLUMNS = LANE_COLUMNS<T>, AT_ONCE = HAS_MMA<T, ARCH> ? 4 : 1;
  const int n = threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < MAX_PIECES; ++i) {
    x.piece[i] = {0, 0, 0, 0};
    const int column = piece_offset(i) / sizeof(T);
    if (i >= WIDTH_PIECES<T> || column >= params.width || n >= params.batch) continue;
    const int head = column / params.head_dim;
    const int unit = (n * params.heads + head) * params.splits;
    const float2* sums = reinterpret_cast<const float2*>(params.partial_sums) + unit;
    const T* out = static_cast<const T*>(params.partial_out) + unit * params.head_dim +
                   column % params.head_dim;
    const int splits = num_splits(keys[n], params.splits);
    SoftmaxPart<COLUMNS> part;
    for (int first = 0; first < splits; first += AT_ONCE) {
      float2 found[AT_ONCE];
      uint4 values[AT_ONCE];
      float maximum = part.maximum;
#pragma unroll
      for (int s = 0; s < AT_ONCE; ++s) {
        found[s] = {-INF, 0.f};
        if (first + s >= splits) continue;
        found[s] = ld_global_cg(sums + first + s);
        values[s] = ld_global_cg_128(out + (first + s) * params.head_dim);
      }
#pragma unroll
      for (int s = 0; s < AT_ONCE; ++s) maximum = fmaxf(maximum, found[s].x);
      part.rescale(maximum);
#pragma unroll
      for (int s = 0; s < AT_ONCE; ++s) {
        if (first + s >= splits) continue;
        const float weight = weight_of(found[s].x, maximum) * found[s].y;
        part.sum += weight;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) part.out[j] += weight * column_of<T>(values[s], j);
      }
    }
    const float inverse = splits ? 1.f / part.sum : 0.f;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) part.out[j] *= inverse;
    x.piece[i] = to_piece<T>(part.out);
  }
}
