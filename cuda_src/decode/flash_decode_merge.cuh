// Merges the partial results of a decode step of attention (flash_decode_step.cuh): those of warps,
// of the blocks of a cluster, and of splits of the keys.
#pragma once
#include "../common/types.cuh"
#include "../common/warp.cuh"
#include "../common/words.cuh"
#include "../ptx/atomics.cuh"
#include "../ptx/cluster.cuh"

constexpr int NUM_WARPS = 4;
constexpr int DECODE_THREADS = NUM_WARPS * 32;
constexpr int ROWS = 8;         // queries of a cluster
constexpr int MAX_SPLITS = 64;  // splits of the keys
constexpr int SAVED_LOADS = 3;  // splits pay if they save a warp at least this number of loads

// The softmax of a query over some of the keys: the largest score (times log2(e)) and the sum of
// the weights relative to it. The weighted sum of the values is stored beside it, as `out`.
struct Sum {
  float max;
  float total;
};

// The partial results of a split, in global memory.
template <int HEAD_DIM>
struct alignas(16) DecodePart {
  float out[ROWS][HEAD_DIM];
  Sum sums[ROWS];
};

// The static shared memory of a block.
template <int HEAD_DIM>
struct DecodeStorage {
  uint4 q[HEAD_DIM / 32][32];  // the queries, in the order of KeyTiles::scores
  float out[NUM_WARPS][ROWS][HEAD_DIM];
  Sum sums[NUM_WARPS][ROWS];
  Sum merged[ROWS];  // the sums of the block, whose output is in out[0]
  bool last;         // the result of is_last_split()
};

// exp2(max - all), the weight of a part (or of a score) whose maximum is `max` among parts whose
// maximum is `all`. It is 0 if none of them has seen a key.
__device__ __forceinline__ float weight_of(float max, float all) {
  return exp2_approx(max - (all == -INF ? 0.f : all));
}

// Merges one output column of a query from PARTS parts, and returns it relative to all.max.
template <int PARTS, class SumOf, class OutOf>
__device__ __forceinline__ float merge(Sum& all, SumOf sum_of, OutOf out_of) {
  Sum sums[PARTS];
  all = {-INF, 0.f};
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    sums[i] = sum_of(i);
    all.max = fmaxf(all.max, sums[i].max);
  }
  float out = 0.f;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const float weight = weight_of(sums[i].max, all.max);
    all.total += weight * sums[i].total;
    out += weight * out_of(i);
  }
  return out;
}

// The number of splits, if a warp without splits would need `loads` loads for its keys. The time of
// the loads falls as 1 / splits and that of the merge grows with the number of splits, so that
// their sum is smallest at a multiple of the square root of `loads`.
__device__ __forceinline__ int splits_of(int loads, int most) {
  const int splits = min(min(loads, int(3.f * sqrtf(float(loads)))), most);
  return loads - ceil_div(loads, max(splits, 1)) < SAVED_LOADS ? 1 : splits;
}

// Whether this split is the last of `splits` to finish; if so, its threads see what the others have
// written. All threads of the blocks of a split call it after they have written their part, and
// after a barrier.
template <int CLUSTER>
__device__ __forceinline__ bool is_last_split(bool& last, int* counter, int splits, int rank) {
  if (rank == 0 && threadIdx.x == 0) {
    const bool found = count_in(counter, splits - 1) == splits - 1;
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) *(CLUSTER > 1 ? cluster_shared(&last, i) : &last) = found;
  }
  CLUSTER > 1 ? cluster_sync() : __syncthreads();  // `last` is written
  return last;
}

// Merges all splits, and calls write(row, column, out, sum) for each result. The blocks of the last
// split call it. First the warps compute the weights of the splits; then each thread merges four
// columns, by loads of 16 bytes, because the time is that of waiting for the loads.
template <int CLUSTER, int HEAD_DIM, class Write>
__device__ __forceinline__ void merge_splits(DecodeStorage<HEAD_DIM>& storage,
                                             const DecodePart<HEAD_DIM>* parts, int splits,
                                             int rows, int rank, Write write) {
  static_assert(sizeof(*parts) == 4 * ROWS * (HEAD_DIM + 2), "as in kernels.py");
  static_assert(ROWS * MAX_SPLITS * sizeof(float) <= sizeof(storage.out), "weights where out was");
  auto* const weights = reinterpret_cast<float (*)[MAX_SPLITS]>(storage.out);  // [ROWS]
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < rows; row += NUM_WARPS) {
    const auto sum_of = [&](int i) {
      return ld_global_cg(reinterpret_cast<const float2*>(&parts[i].sums[row]));
    };
    Sum all = {-INF, 0.f};
    for (int i = lane; i < splits; i += 32) all.max = fmaxf(all.max, sum_of(i).x);
    all.max = warp_max(all.max);
    for (int i = lane; i < splits; i += 32) {
      const float2 sum = sum_of(i);
      weights[row][i] = weight_of(sum.x, all.max);
      all.total += weights[row][i] * sum.y;
    }
    all.total = warp_sum(all.total);
    if (lane == 0) storage.merged[row] = all;
  }
  __syncthreads();  // the weights and the sums are complete
#pragma unroll 1
  for (int i = 4 * (rank * DECODE_THREADS + threadIdx.x); i < rows * HEAD_DIM;
       i += 4 * CLUSTER * DECODE_THREADS) {
    const int row = i / HEAD_DIM, column = i % HEAD_DIM;
    float out[4] = {};
#pragma unroll 8
    for (int part = 0; part < splits; ++part) {
      const float weight = weights[row][part];
      const uint4 x = ld_global_cg_128(&parts[part].out[row][column]);
      const Words<float, 4> four = {{x.x, x.y, x.z, x.w}};
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] += weight * four.at(j);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) write(row, column + j, out[j], storage.merged[row]);
  }
}
