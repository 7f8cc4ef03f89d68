// The third step: attention in one pass over the keys, without S in memory (online softmax, Milakov
// and Gimelshein, arXiv:1805.02867).
//
// A warp has one query; lane l has the columns l, l + 32, ... of q, of the output and of each key
// and value. `top` is the largest score so far, `sum` and `acc` are relative to exp(top): when a
// larger score comes, what was added up is scaled down to it.
//
// Not tiled: every query reads all its keys and values by itself, and its products are no matrix
// products that tensor cores could do. That is the step from here to ../attention/.
#include "../common/convert.cuh"
#include "../common/warp.cuh"
#include "params.cuh"

constexpr int GROUP = 32;  // keys

template <typename T, int LANE_COLUMNS>
__global__ void fused_attention(const __grid_constant__ BaselineAttentionParams params) {
  const int64_t row = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= params.rows) return;

  // ---- q ----
  const T* q = static_cast<const T*>(params.q) + row * params.head_dim;
  float q_values[LANE_COLUMNS], acc[LANE_COLUMNS] = {};
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; ++i) {
    const int d = lane + 32 * i;
    q_values[i] = d < params.head_dim ? params.scale * to_float(q[d]) : 0.f;
  }

  // ---- one key after the other; a sum of its own for each GROUP of them, since one chain of
  // float32 additions over all keys would lose a digit ----
  float top = -INF, sum = 0.f;
  const int64_t keys = params.keys_of_row(row);
  for (int64_t first = 0; first < keys; first += GROUP) {
    const float top_before = top;
    float group_sum = 0.f, group_acc[LANE_COLUMNS] = {};
    for (int64_t key = first; key < min(first + GROUP, keys); ++key) {
      const T* k = static_cast<const T*>(params.k) + params.key_at(row, key);
      const T* v = static_cast<const T*>(params.v) + params.key_at(row, key);
      float score = 0.f;
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; ++i) {
        const int d = lane + 32 * i;
        if (d < params.head_dim) score += q_values[i] * to_float(k[d]);
      }
      score = warp_sum(score);
      const float new_top = fmaxf(top, score);
      const float shrink = expf(top - new_top), weight = expf(score - new_top);
      top = new_top;
      group_sum = group_sum * shrink + weight;
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS; ++i) {
        const int d = lane + 32 * i;
        if (d < params.head_dim) group_acc[i] = group_acc[i] * shrink + weight * to_float(v[d]);
      }
    }
    const float shrink = expf(top_before - top);
    sum = sum * shrink + group_sum;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; ++i) acc[i] = acc[i] * shrink + group_acc[i];
  }

  // ---- out; 0 where no key is seen ----
  T* out = static_cast<T*>(params.out) + row * params.head_dim;
#pragma unroll
  for (int i = 0; i < LANE_COLUMNS; ++i) {
    const int d = lane + 32 * i;
    if (d < params.head_dim) out[d] = from_float<T>(sum == 0.f ? 0.f : acc[i] / sum);
  }
}
