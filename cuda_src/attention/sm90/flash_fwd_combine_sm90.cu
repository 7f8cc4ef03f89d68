// Merges the splits of flash_fwd_sm90.cu with SPLIT, where several blocks have divided the keys of
// a tile. Split s has left out_s = softmax(S) V over its own keys, the maximum max_s of their
// scores (times log2(e)), and total_s, the sum of their weights relative to it. With max the
// largest max_s,
//   weight_s = total_s exp2(max_s - max)    total = sum_s weight_s
//   out = sum_s weight_s / total out_s      lse = max / log2(e) + log total
// A sink is one more term of the total. A block computes ROWS rows of one head, a warp each. Blocks
// and warps share nothing. Source: Flash-Decoding, pytorch.org/blog/flash-decoding.
#include "../../ptx/dependent_launch.cuh"
#include "../../ptx/math.cuh"
#include "../block_info.cuh"
#include "../tile_order.cuh"

constexpr int MAX_SPLITS = 32;  // one lane a split
constexpr int BATCH = 4;        // splits whose outputs are on their way at the same time

template <typename T, int HEAD_DIM, int ROWS>
__global__ void __launch_bounds__(ROWS * 32)
    flash_fwd_combine_sm90(const __grid_constant__ FlashFwdSm90Params params) {
  wait_for_previous_kernel();
  const FlashFwdParams& base = params.base;
  const AttentionShape& shape = base.shape;
  const Tile tile =
      tile_of_block(blockIdx.x, ceil_div(shape.seqlen_q, ROWS), shape.heads_q, shape.batch, 1);
  const Sequence sequence = load_sequence(base, tile.batch);
  const int row = tile.block * ROWS + threadIdx.x / 32;
  if (row >= sequence.seqlen_q) return;
  const int lane = threadIdx.x % 32;
  const int64_t lse_row = tile.batch * base.lse_batch_stride + tile.head * base.lse_head_stride +
                          sequence.start_q + row;

  // ---- the weight of each split, in the lane of its number ----
  float2 sums = {-INF, 0.f};
  if (lane < params.num_splits) sums = params.partial_sums[lane * params.partial_rows + lse_row];
  const float sink = base.sinks ? base.sinks[tile.head] * LOG2E : -INF;
  float top = fmaxf(sums.x, sink);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
  const float offset = top == -INF ? 0.f : top;  // -INF: no split has seen a key
  const float weight = sums.y == 0.f ? 0.f : sums.y * exp2_approx(sums.x - offset);
  float total = weight;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) total += __shfl_xor_sync(~0u, total, mask);
  total += exp2_approx(sink - offset);
  const bool empty = total == 0.f;
  const float inverse = empty ? 0.f : rcp_approx(total);
  if (base.lse && lane == 0) {
    base.lse[lse_row] = empty ? -INF : __fadd_rn(offset, log2_of_sum(total)) * LN2;
  }

  // ---- their sum, two columns a lane of every 64; the loads of a batch wait together ----
  constexpr int PAIRS = ceil_div(HEAD_DIM, 64);
  float2 sum[PAIRS] = {};
#pragma unroll 1
  for (int first = 0; first < params.num_splits; first += BATCH) {
    float2 part[BATCH][PAIRS] = {};
    float share[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int split = first + j;
      share[j] = __shfl_sync(~0u, weight, split % 32) * inverse;
      // A split without keys has written no output.
      if (split >= params.num_splits || share[j] == 0.f) continue;
      const float* row_of_split =
          params.partial_out + (split * params.partial_rows + lse_row) * HEAD_DIM;
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const int column = i * 64 + lane * 2;
        if (column < HEAD_DIM) {
          part[j][i] = *reinterpret_cast<const float2*>(row_of_split + column);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        sum[i].x += share[j] * part[j][i].x;
        sum[i].y += share[j] * part[j][i].y;
      }
    }
  }
  T* out = static_cast<T*>(base.out) +
           base.out_strides.at(tile.batch, sequence.start_q + row, tile.head);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int column = i * 64 + lane * 2;
    if (column >= shape.head_dim) continue;
    *reinterpret_cast<uint32_t*>(out + column) = pack<T, 90>(sum[i].x, sum[i].y);
  }
}
