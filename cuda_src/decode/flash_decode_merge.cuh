// Merges the partial results of a decode step of attention (flash_decode.cu): those of the warps of
// a block in shared memory, and those of the parts of a unit in global memory.
//
// Each part is counted when it has been stored, and the block that counts the last one merges. With
// many parts that is done in two steps, groups of parts first, because a multiprocessor needs a
// microsecond for each 60 KB that it reads. Nobody waits for another block, and the parts are added
// up in their order, whoever does it.
#pragma once
#include "../common/types.cuh"
#include "../common/warp.cuh"
#include "../common/words.cuh"
#include "../ptx/atomics.cuh"
#include "../ptx/ld_global_if.cuh"
#include "decode_work.cuh"

constexpr int PARTS_AT_ONCE = 8;  // whose loads a thread has under way

// The softmax of a query over some of the keys: the largest score (times log2(e)) and the sum of
// the weights relative to it. The weighted sum of the values is stored beside it, as `out`.
struct Sum {
  float max;
  float total;
};

// The result of a part, in global memory.
template <int HEAD_DIM, int ROWS>
struct alignas(16) DecodePart {
  float out[ROWS][HEAD_DIM];
  Sum sums[ROWS];
};

template <int HEAD_DIM, int ROWS>
__device__ __forceinline__ void store_row(DecodePart<HEAD_DIM, ROWS>& to, int row, int column,
                                          const float (&out)[4], Sum sum) {
  *reinterpret_cast<float4*>(&to.out[row][column]) = make_float4(out[0], out[1], out[2], out[3]);
  if (column == 0) to.sums[row] = sum;
}

// exp2(max - all), the weight of a part (or of a score) whose maximum is `max` among parts whose
// maximum is `all`. It is 0 if none of them has seen a key.
__device__ __forceinline__ float weight_of(float max, float all) {
  return exp2_approx(max - (all == -INF ? 0.f : all));
}

__device__ __forceinline__ void add_weighted(float (&sum)[4], float weight, const uint4& x) {
  sum[0] += weight * __uint_as_float(x.x);
  sum[1] += weight * __uint_as_float(x.y);
  sum[2] += weight * __uint_as_float(x.z);
  sum[3] += weight * __uint_as_float(x.w);
}

// Merges up to 32 parts, of which number i is part_of(i), and calls write(row, column, out, sum)
// for four columns at a time. A warp has two rows at a time, so each row belongs to one warp, and
// the results may take the place of a part. The time is that of waiting for the loads, so many are
// under way, those of the first parts beside those of the sums.
template <int HEAD_DIM, class PartOf, class Write>
__device__ __forceinline__ void merge_parts(int count, int rows, PartOf part_of, Write write) {
  constexpr int PAIR = 2;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first_row = threadIdx.x / 32; first_row < rows; first_row += PAIR * NUM_WARPS) {
    const auto row_of = [&](int i) { return min(first_row + i * NUM_WARPS, rows - 1); };
    float2 own[PAIR];  // the sum of part number `lane`
#pragma unroll
    for (int i = 0; i < PAIR; ++i)
      own[i] =
          ld_cg_if(reinterpret_cast<const float2*>(&part_of(lane).sums[row_of(i)]), lane < count);
    Sum all[PAIR];
    float weight[PAIR];
#pragma unroll 1
    for (int column = lane * 4; column - lane * 4 < HEAD_DIM; column += 128) {
      const int valid_column = min(column, HEAD_DIM - 4);
      float out[PAIR][4] = {};
#pragma unroll 1
      for (int first = 0; first < count; first += PARTS_AT_ONCE) {
        uint4 x[PARTS_AT_ONCE][PAIR];
#pragma unroll
        for (int j = 0; j < PARTS_AT_ONCE; ++j) {
          const auto& part = part_of(first + j);
#pragma unroll
          for (int i = 0; i < PAIR; ++i)
            x[j][i] = ld_cg_if_128(&part.out[row_of(i)][valid_column], first + j < count);
        }
        if (first == 0) {
#pragma unroll
          for (int i = 0; i < PAIR; ++i) {
            all[i].max = warp_max(lane < count ? own[i].x : -INF);
            weight[i] = lane < count ? weight_of(own[i].x, all[i].max) : 0.f;
            all[i].total = warp_sum(weight[i] * own[i].y);
          }
        }
#pragma unroll
        for (int j = 0; j < PARTS_AT_ONCE; ++j) {
          if (first + j >= count) break;
#pragma unroll
          for (int i = 0; i < PAIR; ++i)
            add_weighted(out[i], __shfl_sync(0xffffffffu, weight[i], first + j), x[j][i]);
        }
      }
#pragma unroll 1
      for (int i = 0; i < PAIR; ++i) {  // few instructions, which come from memory
        const int row = first_row + i * NUM_WARPS;
        if (row < rows && column < HEAD_DIM) write(row, column, out[0], all[0]);
#pragma unroll
        for (int j = 0; j < 4; ++j) out[0][j] = out[1][j];
        all[0] = all[1];
      }
    }
  }
}

// The parts of a unit that are merged together with part `own`: `count` from `first` on. There are
// at most 32 groups of 32, as many as a warp has lanes.
struct PartGroup {
  int size, first, count;

  __device__ PartGroup(int own, int parts)
      : size(parts <= 2 * PARTS_AT_ONCE ? parts
             : parts <= 64              ? 8
             : parts <= 256             ? 16
                                        : 32),
        first(own / size * size),
        count(min(size, parts - first)) {}
};

// Counts a part that all threads of the block have stored before a barrier. Returns whether it is
// the last of its group; then the others are visible to this thread, and behind another barrier to
// all. A unit has as many counters as parts, which are 0 before and after.
__device__ __forceinline__ bool count_part(const Segment& s, int* counters, bool fixed) {
  const PartGroup group(s.part, s.parts);
  return count_acq_rel(counters + s.slot(group.first, fixed), group.count - 1) == group.count - 1;
}

// Merges the group of a part that was the last one, and then the groups if this one was the last.
// All threads of the block call it; `parts` and `counters` are those of all units.
template <int HEAD_DIM, int ROWS, class Write>
__device__ __forceinline__ void merge_unit(DecodePart<HEAD_DIM, ROWS>* parts, int* counters,
                                           const Segment& s, bool fixed, bool& last, Write write) {
  static_assert(sizeof(*parts) == 4 * ROWS * (HEAD_DIM + 2), "as in kernels.py");
  const PartGroup group(s.part, s.parts);
  const int groups = ceil_div(s.parts, group.size);
  int first = group.first, step = 1, count = group.count;
#pragma unroll 1
  for (;;) {
    const bool whole = groups == 1 || step > 1;
    auto& to = parts[s.slot(first, fixed)];
    merge_parts<HEAD_DIM>(
        count, s.rows, [&](int i) -> const auto& { return parts[s.slot(first + i * step, fixed)]; },
        [&](int row, int column, const float (&out)[4], Sum sum) {
          if (whole) return write(row, column, out, sum);
          store_row(to, row, column, out, sum);
        });
    if (whole) return;
    __syncthreads();  // the group is stored
    if (threadIdx.x == 0) {
      int* counter = counters + s.slot(1, fixed);  // no group begins there
      last = count_acq_rel(counter, groups - 1) == groups - 1;
    }
    __syncthreads();  // `last` is written
    if (!last) return;
    first = 0, step = group.size, count = groups;
  }
}

// Merges the results of the warps of a block to its part, then its group of parts if this one was
// the last, and then the groups, for kernels with fixed splits (Segment::slot()). It is a loop, so
// that the instructions have been read from memory when the last block waits for them. beside() is
// called once by each warp; where parts are counted, that is when all wait for the count.
template <int HEAD_DIM, int ROWS, class Write, class Beside>
__device__ __forceinline__ void merge_levels(const DecodePart<HEAD_DIM, ROWS>* warps,
                                             DecodePart<HEAD_DIM, ROWS>* parts, int* counters,
                                             const Segment& s, bool& last, Write write,
                                             Beside beside) {
  const PartGroup group(s.part, s.parts);
  const int groups = ceil_div(s.parts, group.size);
  parts += s.first_slot, counters += s.first_slot;
  const auto* from = warps;
  int count = NUM_WARPS, step = 1, to = s.part, counter = group.first, others = group.count - 1;
  bool whole = s.parts == 1;
#pragma unroll 1
  for (;;) {
    merge_parts<HEAD_DIM>(
        count, s.rows, [&](int i) -> const auto& { return from[i * step]; },
        [&](int row, int column, const float (&out)[4], Sum sum) {
          if (whole) return write(row, column, out, sum);
          store_row(parts[to], row, column, out, sum);
        });
    const bool of_group = from == warps;  // the next level
    if (!whole) __syncthreads();          // the results are stored
    if (of_group) beside();
    if (whole) return;
    if (threadIdx.x == 0) last = count_acq_rel(counters + counter, others) == others;
    __syncthreads();  // `last` is written
    if (!last) return;
    from = of_group ? parts + group.first : parts;
    count = of_group ? group.count : groups;
    step = of_group ? 1 : group.size;
    to = group.first, counter = 1, others = groups - 1;  // no group begins at 1
    whole = !of_group || groups == 1;
  }
}
