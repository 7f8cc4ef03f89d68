// Finds the HeadRange of every head, from which its scales follow (parts.cuh): the first kernel of
// float32 attention by three float16 products, in a backward pass after flash_bwd_preprocess.cu.
// The ranges are zeros before. The time is that of memory: each tensor is read once.
#include "rows.cuh"

template <int HEAD_DIM>
__global__ void __launch_bounds__(SPLIT_WARPS * 32, 6)
    fp16x3_ranges(const __grid_constant__ Fp16x3SplitParams params) {
  const SplitBlock block(params);
  using Lanes = SplitLanes<HEAD_DIM>;
  uint32_t max_bits = 0;
  uint32_t not_min_bits = 0;
  uint32_t delta_bits = 0;
  Lanes::for_rows(block, params.shape.head_dim, [&](int row, const float4(&x)[Lanes::LOADS]) {
    uint32_t bits = 0;
#pragma unroll
    for (const float4& y : x) {
      bits = max(bits, max(max(__float_as_uint(fabsf(y.x)), __float_as_uint(fabsf(y.y))),
                           max(__float_as_uint(fabsf(y.z)), __float_as_uint(fabsf(y.w)))));
    }
    bits = max_of_lanes<Lanes::PER_ROW>(bits);
    max_bits = max(max_bits, bits);
    if (bits != 0) not_min_bits = max(not_min_bits, ~bits);
    if (block.delta && row < block.rows) {
      delta_bits = max(delta_bits, __float_as_uint(fabsf(block.delta[row])));
    }
  });

  // One update a block, because all blocks of a head meet in one line of memory.
  __shared__ uint32_t of_warps[3][SPLIT_WARPS];
  const uint32_t of_lanes[3] = {max_bits, not_min_bits, delta_bits};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const uint32_t of_warp = max_of_lanes<32>(of_lanes[i]);
    if (threadIdx.x % 32 == 0) of_warps[i][threadIdx.x / 32] = of_warp;
  }
  __syncthreads();  // the maxima of all warps are written
  if (threadIdx.x >= 3) return;
  uint32_t bits = 0;
#pragma unroll
  for (int warp = 0; warp < SPLIT_WARPS; ++warp) bits = max(bits, of_warps[threadIdx.x][warp]);
  if (bits == 0) return;
  const int tensor = static_cast<int>(block.tensor);
  atomicMax(threadIdx.x == 0   ? &block.range->max[tensor]
            : threadIdx.x == 1 ? &block.range->not_min[tensor]
                               : &block.range->delta,
            bits);
}
