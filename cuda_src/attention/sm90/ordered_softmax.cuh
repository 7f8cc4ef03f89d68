// The online softmax of softmax.cuh for warpgroups that compute their exponentials one after the
// other.
#pragma once
#include "../../ptx/opaque.cuh"
#include "../softmax.cuh"

// The order in which warpgroups compute their exponentials: begin() returns after wait(), when the
// warpgroup before has ended its own, and end() calls pass(), which lets the next one begin. `zero`
// is a 0 in shared memory. ptxas moves arithmetic across barriers: the exponentials stay behind
// begin() because they depend on the 0 that it loads after the wait, and in front of pass() because
// of the branch in wait_for_loads().
template <class Wait, class Pass>
struct ExponentialOrder {
  Wait wait;
  Pass pass;
  const float& zero;

  __device__ float begin() const {
    wait();
    return *const_cast<volatile const float*>(&zero);
  }
  template <int N>
  __device__ void end(const float (&weights)[N][4]) const {
    wait_for_loads(__float_as_uint(weights[N - 1][2]) | __float_as_uint(weights[N - 1][3]) |
                   __float_as_uint(weights[N - 2][3]));
    pass();
  }
};
template <class Wait, class Pass>
ExponentialOrder(Wait, Pass, const float&) -> ExponentialOrder<Wait, Pass>;

// RowState::update() with its exponentials in an order.
template <bool BOUNDED, int N, class Order>
__device__ __forceinline__ void update_in_order(RowState& state, float (&scores)[N][4],
                                                float scale_log2, const Order& order) {
  float scale[2];
  float offset[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float new_max = state.max[half];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      new_max = fmaxf(new_max, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    }
    new_max = quad_max(new_max);
    scale[half] = BOUNDED ? scale_log2 : row_scale(new_max, scale_log2);
    offset[half] = __fmul_rn(new_max, scale[half]);
    state.rescale[half] = exp2_approx(__fmul_rn(state.max[half], scale[half]) - offset[half]);
    state.max[half] = new_max;
  }
  const float zero = order.begin();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    offset[half] += zero;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        scores[n][i] = exp2_approx(scores[n][i] * scale[half] - offset[half]);
      }
    }
  }
  order.end(scores);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.sum[half] *= state.rescale[half];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      state.sum[half] += scores[n][2 * half] + scores[n][2 * half + 1];
    }
  }
}
