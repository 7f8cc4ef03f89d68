// The RMSNorm of each head of q and k, and the rotary embedding behind it, in place: what stands
// between a projection and attention in models that normalise heads, as Qwen3 does.
//
// Each warp has one head of one row. Lane i holds the pairs i, i + 32, ... of (j, j + head_dim / 2)
// in registers, and no other warp reads or writes them.
#include "../common/warp.cuh"
#include "../ptx/dependent_launch.cuh"
#include "epilogue.cuh"

constexpr int THREADS = 128;
constexpr int MAX_HEAD_DIM = 256;
constexpr int PAIRS = MAX_HEAD_DIM / 2 / 32;  // of a lane

template <typename T>
__global__ void __launch_bounds__(THREADS)
    head_norm(const __grid_constant__ HeadNormParams params) {
  // Attention of many sequences fills the GPU. If it began here, its blocks would be placed around
  // the clusters of the projection, and half of the multiprocessors would end a third later.
  if (params.rows == 1) launch_next_kernel();
  wait_for_previous_kernel();
  launch_next_kernel();

  // ---- which head ----
  const int64_t warp = (int64_t(blockIdx.x) * THREADS + threadIdx.x) / 32;
  const int heads = params.heads_q + params.heads_k, lane = threadIdx.x % 32;
  const int64_t row = warp / heads;
  if (row >= params.rows) return;  // all lanes of the warp
  const int head = int(warp - row * heads);
  const bool of_q = head < params.heads_q;
  T* x = of_q ? static_cast<T*>(params.q) + row * params.q_row + head * params.q_head
              : static_cast<T*>(params.k) + row * params.k_row +
                    (head - params.heads_q) * params.k_head;
  const T* weight = static_cast<const T*>(of_q ? params.q_weight : params.k_weight);

  // ---- read, and the mean of the squares ----
  const int half = params.head_dim / 2;
  float first[PAIRS], second[PAIRS], squares = 0.f;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int pair = lane + 32 * i;
    first[i] = pair < half ? to_float(x[pair]) : 0.f;
    second[i] = pair < half ? to_float(x[pair + half]) : 0.f;
    squares += first[i] * first[i] + second[i] * second[i];
  }
  const float scale = rsqrtf(warp_sum(squares) / float(params.head_dim) + params.eps);

  // ---- rotate, write ----
  const int64_t known = min(int64_t(params.positions[row]), params.num_positions - 1);
  const int64_t angles = max(int64_t(0), known) * half;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int pair = lane + 32 * i;
    if (pair >= half) continue;
    float a = first[i] * scale * to_float(weight[pair]);
    float b = second[i] * scale * to_float(weight[pair + half]);
    const float2 angle = {params.cos[angles + pair], params.sin[angles + pair]};
    RowRotation<T>::rotate(angle, a, b);
    x[pair] = from_float<T>(a);
    x[pair + half] = from_float<T>(b);
  }
}
