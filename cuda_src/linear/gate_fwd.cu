// out = activation(gate) * up: the hidden activations of a gated MLP whose backward will read gate
// and up again. The kernel is elementwise: each thread has LOADS packs of VECTOR neighbouring
// elements, and reads all of them before it computes. It has no shared memory.
#include "../common/activation.cuh"
#include "../common/words.cuh"
#include "params.cuh"

constexpr int THREADS = 256;

template <typename T, Activation ACTIVATION, int LOADS, int VECTOR>
__global__ void __launch_bounds__(THREADS) gate_fwd(const __grid_constant__ GateParams params) {
  const auto first_of = [&](int load) {
    return ((int64_t(blockIdx.x) * LOADS + load) * THREADS + threadIdx.x) * VECTOR;
  };
  // ---- read ----
  Words<T, VECTOR> gate[LOADS], up[LOADS];
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int64_t first = first_of(load);
    if (first >= params.size) continue;
    gate[load] = load_words<VECTOR>(static_cast<const T*>(params.gate) + first);
    up[load] = load_words<VECTOR>(static_cast<const T*>(params.up) + first);
  }
  // ---- multiply and write ----
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int64_t first = first_of(load);
    if (first >= params.size) continue;
    float out[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
      out[i] = activate<ACTIVATION>(gate[load].at(i)) * up[load].at(i);
    store_words<VECTOR>(static_cast<T*>(params.out) + first, round_words<T>(out));
  }
}
