// The second step: attention as it is written down, one launch for each operation.
//   scores:   S = scale * q k^T     a thread has one score
//   softmax:  P = softmax(S)        a warp has one row of S, and overwrites it
//   output:   out = P v             a thread has one number of out
//
// S has seqlen_q * seqlen_k numbers for each head. It is written, read, written and read again,
// which takes nearly all of the time of a long sequence; fused_attention does without it.
// Scores of keys that a causal row does not see are neither computed nor read.
#include "../common/convert.cuh"
#include "../common/warp.cuh"
#include "params.cuh"

enum Step { scores, softmax, output };

template <typename T>
__device__ void compute_score(const BaselineAttentionParams& params, int64_t thread) {
  const int64_t row = thread / params.seqlen_k, key = thread % params.seqlen_k;
  if (row >= params.rows || key >= params.keys_of_row(row)) return;
  const T* q = static_cast<const T*>(params.q) + row * params.head_dim;
  const T* k = static_cast<const T*>(params.k) + params.key_at(row, key);
  float dot = 0.f;
  for (int64_t d = 0; d < params.head_dim; ++d) dot += to_float(q[d]) * to_float(k[d]);
  params.scores[row * params.seqlen_k + key] = params.scale * dot;
}

__device__ void normalise_row(const BaselineAttentionParams& params, int64_t thread) {
  const int64_t row = thread / 32, lane = thread % 32;
  if (row >= params.rows) return;  // the warp as a whole: its sums need all lanes
  float* s = params.scores + row * params.seqlen_k;
  const int64_t keys = params.keys_of_row(row);
  float top = -INF, sum = 0.f;
  for (int64_t key = lane; key < keys; key += 32) top = fmaxf(top, s[key]);
  top = warp_max(top);  // subtracted, so that no exponential is infinite
  for (int64_t key = lane; key < keys; key += 32) sum += s[key] = expf(s[key] - top);
  sum = warp_sum(sum);
  for (int64_t key = lane; key < keys; key += 32) s[key] /= sum;
}

template <typename T>
__device__ void compute_output(const BaselineAttentionParams& params, int64_t thread) {
  const int64_t row = thread / params.head_dim, d = thread % params.head_dim;
  if (row >= params.rows) return;
  const float* p = params.scores + row * params.seqlen_k;
  const T* v = static_cast<const T*>(params.v) + d;
  const int64_t keys = params.keys_of_row(row);
  float sum = 0.f;
  for (int64_t key = 0; key < keys; ++key) sum += p[key] * to_float(v[params.key_at(row, key)]);
  static_cast<T*>(params.out)[thread] = from_float<T>(sum);
}

template <typename T, Step STEP>
__global__ void naive_attention(const __grid_constant__ BaselineAttentionParams params) {
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if constexpr (STEP == scores) compute_score<T>(params, thread);
  if constexpr (STEP == softmax) normalise_row(params, thread);
  if constexpr (STEP == output) compute_output<T>(params, thread);
}
