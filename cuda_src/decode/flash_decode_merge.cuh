// Merges the parts of a decode step of attention: the results of warps, of blocks and of splits of
// the keys.
#pragma once
#include "../common/types.cuh"
#include "../common/warp.cuh"
#include "../common/words.cuh"
#include "../ptx/atomics.cuh"
#include "../ptx/cluster.cuh"

constexpr int NUM_WARPS = 4;
constexpr int DECODE_THREADS = NUM_WARPS * 32;
constexpr int ROWS = 8;         // queries
constexpr int MAX_SPLITS = 64;  // of the keys
constexpr int SAVED_LOADS = 3;  // of a warp: so many pay for splits of the keys

// The softmax of a query over some of the keys: the largest score (in log2) and the sum of the
// weights relative to it. The sum of the values with these weights lies beside it.
struct Sum {
  float max;
  float total;
};

// The results of a split for its queries.
template <int HEAD_DIM>
struct alignas(16) DecodePart {
  float out[ROWS][HEAD_DIM];
  Sum sums[ROWS];
};

template <int HEAD_DIM>
struct DecodeStorage {
  uint4 q[HEAD_DIM / 32][32];  // for `scores`
  float out[NUM_WARPS][ROWS][HEAD_DIM];
  Sum sums[NUM_WARPS][ROWS];
  Sum merged[ROWS];  // with out[0]
  bool last;         // whether all other splits are done
};

__device__ __forceinline__ float weight_of(float max, float all) {
  return exp2_approx(max - (all == -INF ? 0.f : all));
}

// One column of a query from PARTS parts.
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

// The number of splits of keys that a warp would need `loads` loads for. The loads take 1 / splits
// of the time, the merge takes time that grows with the number of splits: the sum is smallest at a
// multiple of the root of `loads`.
__device__ __forceinline__ int splits_of(int loads, int most) {
  const int splits = min(min(loads, int(3.f * sqrtf(float(loads)))), most);
  return loads - ceil_div(loads, max(splits, 1)) < SAVED_LOADS ? 1 : splits;
}

// Whether `splits` - 1 others were done before: by all threads of the blocks of a split, which have
// written its part. They see what the others wrote.
template <int CLUSTER>
__device__ __forceinline__ bool is_last_split(bool& last, int* counter, int splits, int rank) {
  if (rank == 0 && threadIdx.x == 0) {
    const bool found = count_in(counter, splits - 1) == splits - 1;
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) *(CLUSTER > 1 ? cluster_shared(&last, i) : &last) = found;
  }
  CLUSTER > 1 ? cluster_sync() : __syncthreads();
  return last;
}

// By the blocks of the last split: write(row, column, out, sum) of each query. First the weights of
// the splits, then four columns a thread, as what takes time is to wait for the loads.
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
  __syncthreads();
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
