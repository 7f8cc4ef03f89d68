// The score of a query and a key: scale * q.k, softcap, ALiBi. In units of log2(e), so that its
// exponential is a bare exp2 with the scale already folded into one constant.
#pragma once
#include "../ptx/math.cuh"
#include "block_info.cuh"

template <bool SOFTCAP, bool ALIBI>
struct ScoreFunction {
  float inner;       // softcap only: scale / softcap, the argument of tanh per unit of q.k
  float outer;       // log2(e) * (scale or softcap)
  float slope_log2;  // log2(e) * ALiBi slope

  __device__ ScoreFunction(const AttentionShape& shape, const float* alibi_slopes,
                           int64_t alibi_batch_stride, int batch, int head) {
    inner = SOFTCAP ? shape.scale / shape.softcap : 0.0f;
    outer = LOG2E * (SOFTCAP ? shape.softcap : shape.scale);
    slope_log2 = ALIBI ? LOG2E * alibi_slopes[batch * alibi_batch_stride + head] : 0.0f;
  }

  // distance: of the key from the query's place on the diagonal, col - (row + diagonal).
  // derivative: of the score by scale * q.k, which only the softcap makes differ from 1.
  __device__ float log2(float dot, int distance, float& derivative) const {
    derivative = 1.0f;
    if constexpr (SOFTCAP) {
      dot = tanhf(dot * inner);
      derivative = 1.0f - dot * dot;
    }
    const float score = dot * outer;
    return ALIBI ? score - slope_log2 * fabsf(float(distance)) : score;
  }

  __device__ float log2(float dot, int distance) const {
    float derivative;
    return log2(dot, distance, derivative);
  }
};

// distance as above. One comparison for both ends of the window.
__device__ __forceinline__ bool in_window(const Sequence& sequence, int distance) {
  const uint32_t place = uint32_t(distance + sequence.window_left);  // huge if left of the window
  return place <= uint32_t(sequence.window_left + sequence.window_right);
}
