// out = token_weight[token] + position_weight[position], added in float and rounded once; without
// positions it gathers rows of token_weight.
//
// Each thread has VECTOR neighbouring elements and shares nothing with others. An index outside of
// its table, which the host cannot check, gives NaN.
#include "../common/convert.cuh"
#include "../common/pack.cuh"
#include "../ptx/dependent_launch.cuh"
#include "params.cuh"

constexpr int THREADS = 256;

template <typename T, int VECTOR>
__global__ void __launch_bounds__(THREADS)
    embedding(const __grid_constant__ EmbeddingParams params) {
  launch_next_kernel();
  wait_for_previous_kernel();

  // ---- which elements ----
  const int64_t first = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * VECTOR;
  if (first >= params.rows * params.columns) return;
  const int64_t row = first / params.columns;
  const int column = first - row * params.columns;
  const int token = params.tokens[row];
  const int position = params.positions ? params.positions[row] : 0;
  const bool known = token >= 0 && token < params.vocabulary && position >= 0 &&
                     (!params.positions || position < params.context);

  // ---- read, add, write ----
  Pack<T, VECTOR> out;
  if (known) {
    const T* tokens = static_cast<const T*>(params.token_weight);
    out = load_pack<VECTOR>(tokens + int64_t(token) * params.columns + column);
    if (params.positions) {
      const T* positions = static_cast<const T*>(params.position_weight);
      const auto added = load_pack<VECTOR>(positions + int64_t(position) * params.columns + column);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        out.values[i] = from_float<T>(to_float(out.values[i]) + to_float(added.values[i]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) out.values[i] = from_float<T>(INF - INF);
  }
  store_pack<VECTOR>(static_cast<T*>(params.out) + first, out);
}
