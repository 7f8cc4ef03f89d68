// Attention of one query to the keys of a cache. The keys of a head are divided among `splits`
// blocks, within a block among its warps, and within a warp among groups of lanes. Each keeps the
// largest score, the sum of the exponentials and the weighted sum of the values. The parts of a
// block are merged here, those of the splits where the output is read (load_attended()).
#pragma once
#include "../ptx/ld_global.cuh"
#include "inputs.cuh"

constexpr int MIN_SPLIT_KEYS = 112;  // keys in the registers of a block when the query arrives

// The number of keys that a sequence attends to. A sequence that cannot go on (`keys` is 0) attends
// to its new key only, so that all blocks wait for the same words as if it could.
__device__ __forceinline__ int attended_keys(int keys) { return max(keys, 1); }

// The number of blocks that divide the keys of a sequence; no share is empty.
__device__ __forceinline__ int num_splits(int keys, int splits) {
  return min(ceil_div(attended_keys(keys), MIN_SPLIT_KEYS), splits);
}

// exp2(score - maximum), and 0 where there is no score yet.
__device__ __forceinline__ float weight_of(float score, float maximum) {
  return score == -INF ? 0.f : exp2_approx(score - maximum);
}

// The softmax over a share of the keys, with COLUMNS columns of the weighted sum of the values.
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
  // Merges the parts of lanes whose numbers differ in the bits from `first` on.
  __device__ void merge_lanes(int first) {
    float most = maximum;
#pragma unroll
    for (int mask = first; mask < 32; mask *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, mask));
    rescale(most);
#pragma unroll
    for (int mask = first; mask < 32; mask *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, mask);
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) out[i] += __shfl_xor_sync(0xffffffffu, out[i], mask);
    }
  }
};

// The query, key and value of a head of the new token.
template <int HEAD_DIM>
struct NewToken {
  alignas(16) float rows[3][HEAD_DIM];
};

template <int HEAD_DIM>
struct AttentionStorage {
  float out[CONSUMER_WARPS][HEAD_DIM];
  float2 sums[CONSUMER_WARPS];
};

// The words of a share in `attended`: the output, and four times log2 of the sum of exponentials.
__device__ __forceinline__ int share_words(const DecodeStackParams& params) {
  return row_words(params.head_dim) + 4;
}

template <typename T, int ARCH, int HEAD_DIM, int SEQUENCES>
struct DecodeAttention {
  static constexpr int COLUMNS = LANE_COLUMNS<T>;
  static constexpr int LANES = HEAD_DIM / COLUMNS;  // lanes of a key
  static constexpr int SLOTS = 32 / LANES;          // keys of a warp at once
  static constexpr int STEP = SLOTS * CONSUMER_WARPS;
  static constexpr int UNROLL =
      HAS_MMA<T, ARCH> ? 4 : 2;  // without mma row_dot.cuh needs registers
  using Part = SoftmaxPart<COLUMNS>;

  const DecodeStackParams& params;
  const Step& step;
  const int (&keys)[MAX_BATCH];
  const int (&split_keys)[MAX_BATCH];

  // A share of the keys of a head of a sequence.
  struct Unit {
    bool exists;
    bool newest;       // whether the new key belongs to this share
    int old;           // the number of its keys that were there before this launch
    const T *k, *v;    // those of the first old key
    const float* qkv;  // the query of the head; key and value follow at `width`, 2 * `width`
  };
  // A lane's part of the keys and values that a warp loads at a time.
  struct Chunk {
    uint4 k[UNROLL] = {}, v[UNROLL] = {};
  };
  __device__ Unit unit(int index) const {
    const int pair = quotient(index, params.splits_inverse), split = index - pair * params.splits;
    const int batch = pair < num_pairs() ? quotient(pair, params.heads_inverse) : 0;
    const int head = pair - batch * params.heads, most = split_keys[batch], begin = split * most;
    const int all = pair < num_pairs() ? attended_keys(keys[batch]) : 0;
    return {
        begin < all,
        begin + most >= all,
        min(all - 1 - begin, most),
        static_cast<const T*>(params.k_cache) + params.k_strides.at(step.layer, batch, begin, head),
        static_cast<const T*>(params.v_cache) + params.v_strides.at(step.layer, batch, begin, head),
        params.qkv + int64_t(batch) * 3 * params.width + head * params.head_dim};
  }
  __device__ int num_pairs() const { return params.batch * params.heads; }

  // One warp calls it. It brings the old keys and values of this block's units into L2.
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

  // This warp's first chunk of the old keys of a unit, which do not depend on other blocks.
  __device__ Chunk first_chunk(const Unit& share) const {
    return load(share, threadIdx.x / 32 * SLOTS);
  }

  // `share` is the unit of index blockIdx.x, `chunk` its `first_chunk`.
  __device__ void operator()(AttentionStorage<HEAD_DIM>& storage, NewToken<HEAD_DIM>& token,
                             Unit share, Chunk chunk) const {
#pragma unroll 1
    for (int index = blockIdx.x; index < num_pairs() * params.splits; index += gridDim.x) {
      if (index != blockIdx.x) {
        share = unit(index);
        chunk = first_chunk(share);
      }
      if (share.exists) {
        receive_token(token, share);
        consumers_sync();  // also: what was in the storage has been read
        const Part part = warp_part(token, share, chunk);
        store_in_block(storage, part);
        consumers_sync();
      }
      send_merged(storage, index, share.exists);
    }
  }

 private:
  __device__ Chunk load(const Unit& share, int first) const {
    Chunk chunk;
    const int slot = threadIdx.x % 32 / LANES, column = threadIdx.x % LANES * COLUMNS;
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int key = first + i * STEP + slot;
      if (key >= share.old || column >= params.head_dim) continue;
      chunk.k[i] = ld_global_cg_128(share.k + key * params.k_strides.row + column);
      chunk.v[i] = ld_global_cg_128(share.v + key * params.v_strides.row + column);
    }
    return chunk;
  }

  // Receives the new query, key and value for the whole block, so that few threads request them.
  __device__ void receive_token(NewToken<HEAD_DIM>& token, const Unit& share) const {
    const int row = threadIdx.x / 32, column = threadIdx.x % 32 * 4;
    if (row >= (share.newest ? 3 : 1)) return;
    uint4 words[1];
    receive(words, column < params.head_dim, step.tag, share.qkv + row * params.width + column,
            [](int) { return 0; });
    if (column >= HEAD_DIM) return;
    *reinterpret_cast<uint4*>(&token.rows[row][column]) =
        column < params.head_dim ? words[0] : uint4{0, 0, 0, 0};
  }

  // Computes with this warp's keys; a lane has COLUMNS columns of a key. In the end every slot has
  // the merged result.
  __device__ Part warp_part(const NewToken<HEAD_DIM>& token, const Unit& share,
                            Chunk& chunk) const {
    const int warp = threadIdx.x / 32, slot = threadIdx.x % 32 / LANES;
    const int column = threadIdx.x % LANES * COLUMNS;

    using Columns = Pack<float, COLUMNS>;
    const Columns query = load_pack<COLUMNS>(token.rows[0] + column);
    Part part;
    // ---- the new key, in the last warp, which has the fewest old keys ----
    if (share.newest && warp == CONSUMER_WARPS - 1) {
      const Columns key = load_pack<COLUMNS>(token.rows[1] + column);
      const Columns value = load_pack<COLUMNS>(token.rows[2] + column);
      float score = 0.f;
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j)
        score += query.values[j] * to_float(from_float<T>(key.values[j]));
      score = sum_of_key(score);
      if (slot == 0) {
        part.maximum = score * params.scale_log2;
        part.sum = 1.f;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) part.out[j] = to_float(from_float<T>(value.values[j]));
      }
    }

    // ---- the old keys ----
    const int old = share.old;
#pragma unroll 1
    for (int first = warp * SLOTS; first < old; first += UNROLL * STEP) {
      if (first > warp * SLOTS) chunk = load(share, first);
      float scores[UNROLL], maximum = part.maximum;
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        scores[i] = 0.f;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
          scores[i] += query.values[j] * column_of<T>(chunk.k[i], j);
        scores[i] = sum_of_key(scores[i]);
        const bool valid = first + i * STEP + slot < old;
        scores[i] = valid ? scores[i] * params.scale_log2 : -INF;
        maximum = fmaxf(maximum, scores[i]);
      }
      part.rescale(maximum);
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        const float weight = weight_of(scores[i], maximum);
        part.sum += weight;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) part.out[j] += weight * column_of<T>(chunk.v[i], j);
      }
    }
    part.merge_lanes(LANES);
    return part;
  }

  // The sum over the lanes of a key.
  __device__ float sum_of_key(float value) const {
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
    return value;
  }

  __device__ void store_in_block(AttentionStorage<HEAD_DIM>& storage, const Part& part) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane < LANES) {
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) storage.out[warp][lane * COLUMNS + i] = part.out[i];
    }
    if (lane == 0) storage.sums[warp] = {part.maximum, part.sum};
  }

  // Each thread sends one column of the head, and four threads log2 of the sum of the exponentials.
  // Words of a share that does not exist are sent, too: the tags of all words must flip in every
  // round, as the share may exist in the next launch.
  __device__ void send_merged(const AttentionStorage<HEAD_DIM>& storage, int index,
                              bool exists) const {
    const int column = threadIdx.x, beyond = column - params.head_dim;
    if (beyond >= 4) return;
    float value = 0.f;
    if (exists) {
      float maximum = -INF, sum = 0.f, out = 0.f;
#pragma unroll
      for (int warp = 0; warp < CONSUMER_WARPS; ++warp)
        maximum = fmaxf(maximum, storage.sums[warp].x);
#pragma unroll
      for (int warp = 0; warp < CONSUMER_WARPS; ++warp) {
        const float weight = weight_of(storage.sums[warp].x, maximum);
        sum += weight * storage.sums[warp].y;
        out += weight * storage.out[warp][min(column, HEAD_DIM - 1)];
      }
      value = beyond < 0 ? out * rcp_approx(sum) : maximum + log2_of_sum(sum);
    }
    const int word = beyond < 0 ? place(column) : row_words(params.head_dim) + beyond;
    float* of_copy = params.attended + index * share_words(params) + word;
#pragma unroll
    for (int i = 0; i < COPIES<SEQUENCES>; ++i, of_copy += params.copy_words)
      send(of_copy, value, step.tag);
  }
};

// Loads the output of attention. The vectors of a sequence are the splits of its keys, weighted for
// each head. Several pieces are loaded at a time, because of the latency.
template <typename T, int ARCH, class X>
__device__ __forceinline__ void load_attended(X& x, const DecodeStackParams& params,
                                              const int (&keys)[MAX_BATCH], uint32_t tag) {
  constexpr int COLUMNS = LANE_COLUMNS<T>, FOURS = COLUMNS / 4 + 1, AT_ONCE = 4;
  const int n = x.sequence(), split = x.part(), row = share_words(params);
  const bool exists = n < params.batch && split < num_splits(keys[n], params.splits);
  const float* words_of_split = params.attended + own_copy<X::SEQUENCES>() * params.copy_words +
                                (n * params.heads * params.splits + split) * row;
  const int pieces = pieces_of_warp(params.width * int(sizeof(T)));
#pragma unroll
  for (int first = 0; first < X::PIECES; first += AT_ONCE) {
    if (first >= pieces) break;
    int offsets[AT_ONCE], of_lse[AT_ONCE];
    bool inside[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int column = column_of_piece<T>(first + i);
      const int head = quotient(column, params.head_dim_inverse);
      inside[i] = exists && column < params.width;
      offsets[i] = head * params.splits * row + place(column - head * params.head_dim);
      of_lse[i] = head * params.splits * row + row_words(params.head_dim);
    }
    uint4 words[AT_ONCE * FOURS];
    int count = 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) count += inside[i];
    receive(words, count * FOURS, tag, words_of_split, [&](int i) {
      return i % FOURS < FOURS - 1 ? offsets[i / FOURS] + i % FOURS * NEXT_FOUR : of_lse[i / FOURS];
    });
    float maximum[AT_ONCE], weight[AT_ONCE], sum[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      weight[i] = inside[i] ? __uint_as_float(words[i * FOURS + FOURS - 1].x) : -INF;
      maximum[i] = weight[i];
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      if (mask < 4 * X::SEQUENCES) continue;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(0xffffffffu, maximum[i], mask));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) sum[i] = weight[i] = weight_of(weight[i], maximum[i]);
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      if (mask < 4 * X::SEQUENCES) continue;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], mask);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (first + i >= X::PIECES) break;
      float values[COLUMNS];
      to_floats(values, words, i * FOURS);
      const float scale = weight[i] * rcp_approx(sum[i]);
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) values[j] *= scale;
      x.piece[first + i] = inside[i] ? to_piece<T, ARCH>(values) : uint4{0, 0, 0, 0};
    }
  }
}
