// The rows that the blocks of fp16x3_ranges.cu and fp16x3_split.cu read: each block SPLIT_ROWS rows
// of one head of one tensor.
#pragma once
#include "../block_info.cuh"
#include "parts.cuh"

constexpr int SPLIT_WARPS = 4;
constexpr int SPLIT_ROWS = 64;
constexpr int INT_MAX = 0x7fffffff;
constexpr int ROWS_PER_WARP = SPLIT_ROWS / SPLIT_WARPS;

struct SplitBlock {
  SplitTensor tensor;
  const float* data;   // the first row of the block
  const float* delta;  // that of the first row, if the tensor is dout, or null
  HeadRange* range;
  int64_t row_stride;
  int64_t part_row;  // the first row of the block in the parts of the head
  int batch;
  int head;
  bool is_first;  // the first block of its sequence
  int rows;       // <= 0: nothing to do
  bool vector;    // rows can be read by 16 bytes

  // Blocks of q come first, then those of k, v and dout. Consecutive blocks have the same rows of
  // all heads, since these are usually contiguous.
  __device__ explicit SplitBlock(const Fp16x3SplitParams& params) {
    const AttentionShape& shape = params.shape;
    const uint32_t blocks_q =
        uint32_t(ceil_div(shape.seqlen_q, SPLIT_ROWS)) * shape.heads_q * shape.batch;
    const uint32_t blocks_k =
        uint32_t(ceil_div(shape.seqlen_k, SPLIT_ROWS)) * shape.heads_kv * shape.batch;
    uint32_t index = blockIdx.x;
    tensor = SplitTensor::Q;
    const float* base = params.q;
    Strides strides = params.q_strides;
    const auto step = [&](uint32_t blocks, SplitTensor next, const float* x, const Strides& s) {
      if (index < blocks) return false;
      index -= blocks;
      tensor = next;
      base = x;
      strides = s;
      return true;
    };
    step(blocks_q, SplitTensor::K, params.k, params.k_strides) &&
        step(blocks_k, SplitTensor::V, params.v, params.v_strides) &&
        step(blocks_k, SplitTensor::DOUT, params.dout, params.dout_strides);

    const bool of_keys = tensor == SplitTensor::K || tensor == SplitTensor::V;
    const int heads = of_keys ? shape.heads_kv : shape.heads_q;
    const int longest = of_keys ? shape.seqlen_k : shape.seqlen_q;
    head = index % heads;
    const int block = index / heads % ceil_div(longest, SPLIT_ROWS);
    batch = index / heads / ceil_div(longest, SPLIT_ROWS);
    const Sequence sequence = load_sequence(params, batch);
    const int row = block * SPLIT_ROWS + int(threadIdx.x / 32) * ROWS_PER_WARP;
    is_first = tensor == SplitTensor::Q && block == 0 && head == 0;
    rows = min(ROWS_PER_WARP, (of_keys ? sequence.seqlen_k : sequence.seqlen_q) - row);
    const int64_t first = (of_keys ? sequence.start_k : sequence.start_q) + row;
    data = base + strides.at(batch, first, head);
    row_stride = strides.row;
    const bool packed = of_keys ? params.cu_seqlens_k : params.cu_seqlens_q;
    part_row = first + (packed ? 0 : int64_t(batch) * longest);
    delta = tensor == SplitTensor::DOUT
                ? params.delta + head * params.accum_rows + sequence.accum_start + row
                : nullptr;
    const int head_kv = of_keys ? head : head / (shape.heads_q / shape.heads_kv);
    range = params.split.ranges + int64_t(batch) * shape.heads_kv + head_kv;
    vector = (reinterpret_cast<int64_t>(base) |
              (strides.batch | strides.row | strides.head) * int64_t(sizeof(float))) %
                 16 ==
             0;
  }

  // Four columns of a row, 0 from head_dim on; `column` is a multiple of 4.
  __device__ float4 load(int row, int column, int head_dim) const {
    const float* x = data + row * row_stride + column;
    if (vector && column + 4 <= head_dim) return *reinterpret_cast<const float4*>(x);
    return {column < head_dim ? x[0] : 0.f, column + 1 < head_dim ? x[1] : 0.f,
            column + 2 < head_dim ? x[2] : 0.f, column + 3 < head_dim ? x[3] : 0.f};
  }
};

// How the rows of a warp are read. PER_ROW neighbouring lanes read a row, four columns at a time,
// so that a warp reads AT_ONCE rows with one instruction. It issues the loads of a batch of rows
// before it uses the first, because the time is that of memory.
template <int HEAD_DIM>
struct SplitLanes {
  static constexpr int PER_ROW = HEAD_DIM <= 32 ? 8 : HEAD_DIM <= 64 ? 16 : 32;
  static constexpr int LOADS = ceil_div(HEAD_DIM, 4 * PER_ROW);
  static constexpr int AT_ONCE = 32 / PER_ROW;
  static constexpr int BATCH = LOADS == 1 ? 4 : 2;
  static_assert(ROWS_PER_WARP % (AT_ONCE * BATCH) == 0, "whole batches of rows");

  __device__ static int row() { return threadIdx.x % 32 / PER_ROW; }
  __device__ static int column(int load) { return (threadIdx.x % PER_ROW + load * PER_ROW) * 4; }

  // Calls use(row, x) with all elements of this lane in each of its rows. Rows past the end are
  // zeros.
  template <class Use>
  __device__ static void for_rows(const SplitBlock& block, int head_dim, Use use) {
#pragma unroll 1
    for (int first = 0; first < ROWS_PER_WARP; first += AT_ONCE * BATCH) {
      if (first >= block.rows) break;
      float4 x[BATCH][LOADS] = {};
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int row = first + i * AT_ONCE + SplitLanes::row();
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
          if (row < block.rows) x[i][load] = block.load(row, column(load), head_dim);
        }
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) use(first + i * AT_ONCE + SplitLanes::row(), x[i]);
    }
  }
};

// The maximum, over LANES neighbouring lanes, of the bits of non-negative floats.
template <int LANES>
__device__ __forceinline__ uint32_t max_of_lanes(uint32_t x) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) {
    x = max(x, __shfl_xor_sync(0xffffffffu, x, mask));
  }
  return x;
}
