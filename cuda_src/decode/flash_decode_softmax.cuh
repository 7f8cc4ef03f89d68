// Scores and softmax of a decode step (flash_decode.cu), on the accumulators of K Q^T: keys are
// rows, queries columns. The options are uniform values and not template parameters: the kernel
// waits for memory, and a branch that all threads take costs nothing beside that.
#pragma once
#include "../ptx/stmatrix.cuh"
#include "flash_decode_keys.cuh"
#include "flash_decode_rows.cuh"

// Turns the products of 16 * TILES keys from `first` on, with the queries of `rows` from 2c on,
// into scores times log2(e).
template <int TILES>
__device__ __forceinline__ void apply_score(float (&s)[TILES][4], const FlashDecodeParams& params,
                                            const Segment& segment, const QueryRow* rows, int first,
                                            bool masked) {
  const QuadLane lane;
  if (params.to_tanh != 0.f) {
#pragma unroll
    for (int i = 0; i < 4 * TILES; ++i)
      s[i / 4][i % 4] = tanh_exp2(s[i / 4][i % 4] * params.to_tanh);
  }
#pragma unroll
  for (int i = 0; i < 4 * TILES; ++i) s[i / 4][i % 4] *= params.scale_log2;
  if (params.alibi_slopes || masked) {
#pragma unroll
    for (int query = 0; query < 2; ++query) {
      const QueryRow row = rows[lane.c * 2 + query];
      const int begin = max(segment.sequence.leftpad, row.diagonal - params.window_left);
      const int visible = min(segment.sequence.length, row.diagonal + params.window_right + 1);
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i) {
        float& score = s[i / 2][i % 2 * 2 + query];
        const int key = first + i * 8 + lane.g;
        score -= row.slope_log2 * fabsf(float(key - row.diagonal));
        if (masked && (key < begin || key >= visible)) score = -INF;
      }
    }
  }
}

// The softmax of queries 2c and 2c + 1 in lane 4 g + c. `total` stays the sum over the lane's own
// keys until the end; the maximum is that of the warp.
template <int TILES>
struct QueryPair {
  float max[2] = {-INF, -INF};
  float total[2] = {0.f, 0.f};

  // Turns scores into weights. rescale is the factor for the outputs so far.
  __device__ void update(float (&s)[TILES][4], float (&rescale)[2]) {
#pragma unroll
    for (int query = 0; query < 2; ++query) {
      float new_max = max[query];
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i) new_max = fmaxf(new_max, s[i / 2][i % 2 * 2 + query]);
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2)
        new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, mask));
      rescale[query] = weight_of(max[query], new_max);
      max[query] = new_max;
      total[query] *= rescale[query];
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i) {
        float& score = s[i / 2][i % 2 * 2 + query];
        score = weight_of(score, new_max);
        total[query] += score;
      }
    }
  }

  // The sum of a query over all lanes.
  __device__ Sum sum(int query) const {
    float all = total[query];
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) all += __shfl_xor_sync(0xffffffffu, all, mask);
    return {max[query], all};
  }
};

// Weights as an operand of the product with the values.
template <typename T, int ARCH, int TILES>
__device__ __forceinline__ void pack_weights(const float (&s)[TILES][4], uint32_t (&p)[TILES][2]) {
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    const float* weights = s[i / 2] + i % 2 * 2;
    p[i / 2][i % 2] = movmatrix_trans(pack<T, ARCH>(weights[0], weights[1]));
  }
}
