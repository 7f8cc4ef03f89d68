// Chooses one token for each row of logits: the largest (GREEDY), or one that is drawn from
// softmax(logits / temperature), restricted to the top_k largest logits, and then to the fewest of
// these that hold top_p of their probability. Logits equal to the last one that is kept stay, too.
//
// A block has one row, which stays in L2, and reads it in several passes. It finds
//   1. the largest logit; the later passes use the distances to it,
//   2. the distance up to which logits are kept, by search(), for top_k and then for top_p,
//   3. the sum of the weights that are kept; a random number from Philox is a part of it,
//   4. the token at which the running sum, in the order of the tokens, exceeds that part. One warp
//      finds it, because each warp of pass 3 has a segment of the row.
// Weights are integers (probability.cuh), so the result is deterministic. With `ends` the state of
// the row advances to the next step of decoding. Blocks share nothing, so none waits for another.
#include "../common/philox.cuh"
#include "../common/words.cuh"
#include "block_sum.cuh"
#include "params.cuh"
#include "probability.cuh"

// Calls visit(logit, index) for each logit, within a thread in their order. A thread has LOADS
// loads of 16 bytes in flight. A row may begin at any element; the elements at its ends that do not
// fill 16 aligned bytes are read one by one.
template <int LOADS, typename T, class Visit>
__device__ __forceinline__ void for_each(const T* logits, int columns, Visit visit) {
  constexpr int N = 16 / sizeof(T);
  const int before = reinterpret_cast<uint64_t>(logits) % 16 / sizeof(T);
  const int chunks = ceil_div(before + columns, N);
  for (int chunk = threadIdx.x; chunk < chunks; chunk += LOADS * BLOCK) {
    Words<T, N> found[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int first = (chunk + i * BLOCK) * N - before;
      if (first >= 0 && first + N <= columns) found[i] = load_words<N>(logits + first);
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int first = (chunk + i * BLOCK) * N - before;
      if (first >= 0 && first + N <= columns) {
#pragma unroll
        for (int j = 0; j < N; ++j) visit(found[i].at(j), first + j);
      } else {
        for (int j = max(first, 0); j < min(first + N, columns); ++j) visit(to_float(logits[j]), j);
      }
    }
  }
}

template <typename T>
struct Row {
  const T* logits;
  int columns;
  float largest;
  float scale;

  // The distance of a logit from the largest: not negative, and not -0 either.
  __device__ __forceinline__ float distance(float logit) const { return __fsub_rn(largest, logit); }
};

template <int LOADS, typename T>
__device__ __forceinline__ Largest largest_of(const T* logits, int columns) {
  Largest best = {-INF, columns};
  bool is_number = true;
  for_each<LOADS>(logits, columns, [&](float logit, int i) {
    is_number = is_number && logit == logit;
    if (logit > best.logit) best = {logit, i};
  });
  if (!is_number) best.logit = INF;
  return block_sum(best);
}

// The smallest distance (the bits of a float) within which the values add up to `target`, or all
// bits set if they never do. It is a radix search by 11, 11 and 9 bits: distances are not negative,
// so their order is that of their bits.
template <class Value, typename T>
__device__ __forceinline__ uint32_t search(const Row<T>& row, uint64_t target, Value value) {
  constexpr int BINS = 2 * BLOCK;
  constexpr int SHIFTS[] = {20, 9, 0};
  __shared__ uint64_t bins[BINS];
  __shared__ uint64_t below;
  __shared__ int chosen;
  uint32_t prefix = 0;
#pragma unroll
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = SHIFTS[pass], width = pass < 2 ? 11 : 9;
    __syncthreads();
    bins[threadIdx.x] = bins[threadIdx.x + BLOCK] = 0;
    if (threadIdx.x == 0) chosen = -1;
    __syncthreads();
    for_each<2>(row.logits, row.columns, [&](float logit, int) {
      const float distance = row.distance(logit);
      const uint32_t bits = __float_as_uint(distance);
      if (pass > 0 && bits >> (shift + width) != prefix) return;
      const uint64_t added = value(distance);
      if (added > 0) atomicAdd(&bins[bits >> shift & (1u << width) - 1], added);
    });
    __syncthreads();
    const uint64_t first = bins[2 * threadIdx.x], second = bins[2 * threadIdx.x + 1];
    uint64_t total;
    const uint64_t before = block_exclusive_sum(first + second, total);
    if (before < target && target <= before + first + second) {
      const bool in_first = target <= before + first;
      chosen = 2 * threadIdx.x + !in_first;
      below = before + (in_first ? 0 : first);
    }
    __syncthreads();
    if (chosen < 0) return 0xffffffffu;
    prefix = prefix << width | chosen;
    target -= below;
  }
  return prefix;
}

// The distance (the bits of a float) up to which tokens are kept.
template <typename T>
__device__ __forceinline__ uint32_t last_kept(const Row<T>& row, int top_k, uint32_t top_p) {
  const auto weight = [&](float distance) { return weight_of(distance, row.scale); };
  uint32_t last = 0xffffffffu;
  if (top_k > 0)
    last = search(row, top_k, [&](float distance) { return uint64_t(weight(distance) > 0); });
  if (top_p > 0) {
    uint64_t sum = 0;
    for_each<2>(row.logits, row.columns, [&](float logit, int) {
      const float distance = row.distance(logit);
      if (__float_as_uint(distance) <= last) sum += weight(distance);
    });
    sum = block_sum(sum);
    const uint64_t part = (sum >> 32) * top_p + ((sum & 0xffffffffu) * top_p >> 32);
    last = search(row, max(part, uint64_t(1)), weight);
  }
  return last;
}

// The token at which the running sum of the kept weights exceeds a random part of their sum. One
// thread returns it; the others return -1.
template <typename T>
__device__ __forceinline__ int draw(const Row<T>& row, uint32_t last, uint64_t random) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int segment = round_up(ceil_div(row.columns, MAX_WARPS), 32);
  const int begin = min(warp * segment, row.columns), end = min(begin + segment, row.columns);
  const auto weight = [&](int i) {
    if (i >= end) return uint64_t(0);
    const float distance = row.distance(to_float(row.logits[i]));
    return __float_as_uint(distance) <= last ? weight_of(distance, row.scale) : 0;
  };
  uint64_t sum = 0;
  for (int i = begin + lane; i < end; i += 32) sum += weight(i);
  uint64_t total;
  const uint64_t before = block_exclusive_sum(sum, total);
  const uint64_t part = __umul64hi(random, total);

  uint64_t running = __shfl_sync(0xffffffffu, before, 0);
  const uint64_t after = __shfl_sync(0xffffffffu, before + sum, 31);
  if (part < running || part >= after) return -1;
  for (int i = begin + lane;; i += 32) {  // ends, as part < after
    const uint64_t value = weight(i), inclusive = warp_inclusive_sum(value);
    const bool exceeds = running + inclusive > part;
    if (__any_sync(0xffffffffu, exceeds))
      return exceeds && running + inclusive - value <= part ? i : -1;
    running += __shfl_sync(0xffffffffu, inclusive, 31);
  }
}

__device__ __forceinline__ void finish(const SampleParams& params, int row, int token) {
  params.tokens[row] = token;
  if (!params.ends) return;
  const int position = min(params.positions[row] + 1, params.limit);
  params.next_tokens[row] = max(token, 0);
  params.positions[row] = position;
  params.ends[row] = position + 1;
}

// How the token of a row is chosen.
struct Choice {
  float scale;
  int top_k;
  uint32_t top_p;
  uint32_t number;  // in the counter of the random numbers
  uint64_t seed;
};

__device__ __forceinline__ Choice choice_of(const SampleParams& params, int row) {
  if (!params.choices)
    return {params.scale, params.top_k, params.top_p, uint32_t(row), params.seed};
  const int* words = params.choices + int64_t(CHOICE_WORDS) * row;
  const uint64_t seed = uint64_t(uint32_t(words[5])) << 32 | uint32_t(words[4]);
  return {__int_as_float(words[0]), words[1], uint32_t(words[2]), uint32_t(words[3]), seed};
}

template <typename T, bool GREEDY>
__global__ void __launch_bounds__(BLOCK, GREEDY ? 0 : 1)
    sample(const __grid_constant__ SampleParams params) {
  // ---- the largest logit ----
  const int index = blockIdx.x;
  const T* logits = static_cast<const T*>(params.logits) + index * params.stride;
  const Largest best = largest_of<GREEDY ? 8 : 2>(logits, params.columns);
  if (!(best.logit < INF && best.logit > -INF)) {  // a NaN, infinity, or nothing but -infinity
    if (threadIdx.x == 0) finish(params, index, -1);
    return;
  }
  if constexpr (GREEDY) {
    if (threadIdx.x == 0) finish(params, index, best.index);
    return;
  }

  // ---- which tokens are left, and one of them ----
  const Choice choice = choice_of(params, index);
  if (choice.scale == 0.f) {
    if (threadIdx.x == 0) finish(params, index, best.index);
    return;
  }
  // Of a largest logit of -0 the distance of a +0 would be -0, whose bits come behind all others.
  const Row<T> row = {logits, params.columns, best.logit + 0.f, choice.scale};
  const uint32_t counter = params.positions ? params.positions[index] : 0;
  const uint4 random = philox(choice.seed, counter, choice.number, 0);
  const uint32_t last = last_kept(row, choice.top_k, choice.top_p);
  const int token = draw(row, last, uint64_t(random.x) << 32 | random.y);
  if (token >= 0) finish(params, index, token);
}
