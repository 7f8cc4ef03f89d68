// The gradient of the sinks, [heads_q] in float32. A sink is one more score in every row of its
// head, with a value vector of zeros, so
//   dsink = sum over rows of p * (0 - delta),   p = exp2(sink_log2 - lse_log2)
// One block sums over all rows of one head, always in the same order, so that the result is
// deterministic. It runs after flash_bwd_preprocess.cu, which has written lse_log2 (+inf where a
// row has no weights) and delta.
#include "../ptx/math.cuh"
#include "block_info.cuh"

template <int NUM_WARPS>
__global__ void __launch_bounds__(NUM_WARPS * 32) flash_bwd_sinks(const FlashBwdParams params) {
  const int head = blockIdx.x;
  const float sink_log2 = params.sinks[head] * LOG2E;
  float sum = 0.0f;
  for (int batch = 0; batch < params.shape.batch; ++batch) {
    const Sequence sequence = load_sequence(params, batch);
    const int64_t accum_row = head * params.accum_rows + sequence.accum_start;
    const float* lse_log2 = params.lse_log2 + accum_row;
    const float* delta = params.delta + accum_row;
    for (int row = threadIdx.x; row < sequence.seqlen_q; row += NUM_WARPS * 32)
      sum -= exp2_approx(sink_log2 - lse_log2[row]) * delta[row];
  }

#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  __shared__ float sums[NUM_WARPS];
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();  // the sums of all warps are written
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < NUM_WARPS; ++warp) sum += sums[warp];
    params.dsinks[head] = sum;
  }
}
