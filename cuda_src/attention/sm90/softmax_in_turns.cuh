// The online softmax of softmax.cuh for warpgroups that compute their exponentials in turns.
#pragma once
#include "../../ptx/opaque.cuh"
#include "../softmax.cuh"

// A turn of a warpgroup: until it has passed it on, no other computes exponentials. wait() waits
// for the turn and end() ends it; `zero` is a 0 in shared memory. ptxas moves arithmetic across
// barriers: the exponentials stay behind take() because they depend on the 0 that it loads after
// the wait, and in front of end() because of the branch in wait_for_loads().
template <class Wait, class End>
struct Turn {
  Wait wait;
  End end;
  const float& zero;

  __device__ float take() const {
    wait();
    return *const_cast<volatile const float*>(&zero);
  }
  template <int N>
  __device__ void pass(const float (&weights)[N][4]) const {
    wait_for_loads(__float_as_uint(weights[N - 1][2]) | __float_as_uint(weights[N - 1][3]) |
                   __float_as_uint(weights[N - 2][3]));
    end();
  }
};
template <class Wait, class End>
Turn(Wait, End, const float&) -> Turn<Wait, End>;

// RowState::update() with its exponentials in a turn.
template <bool BOUNDED, int N, class Turn>
__device__ __forceinline__ void update_in_turns(RowState& state, float (&scores)[N][4],
                                                float scale_log2, const Turn& turn) {
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
  const float zero = turn.take();
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
  turn.pass(scores);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.sum[half] *= state.rescale[half];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      state.sum[half] += scores[n][2 * half] + scores[n][2 * half + 1];
    }
  }
}
