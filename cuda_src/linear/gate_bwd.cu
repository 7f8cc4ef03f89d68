// Gradients of gate_fwd: dgate = dout * up * activation'(gate), dup = dout * activation(gate).
// The kernel is elementwise: each thread has LOADS packs of VECTOR neighbouring elements, and reads
// all of them before it computes. It has no shared memory.
#include "../common/activation.cuh"
#include "../common/words.cuh"
#include "params.cuh"

constexpr int THREADS = 256;

template <typename T, Activation ACTIVATION, int LOADS, int VECTOR>
__global__ void __launch_bounds__(THREADS) gate_bwd(const __grid_constant__ GateParams params) {
  const auto first_of = [&](int load) {
    return ((int64_t(blockIdx.x) * LOADS + load) * THREADS + threadIdx.x) * VECTOR;
  };
  // ---- read ----
  Words<T, VECTOR> gate[LOADS], up[LOADS], dout[LOADS];
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int64_t first = first_of(load);
    if (first >= params.size) continue;
    gate[load] = load_words<VECTOR>(static_cast<const T*>(params.gate) + first);
    up[load] = load_words<VECTOR>(static_cast<const T*>(params.up) + first);
    dout[load] = load_words<VECTOR>(static_cast<const T*>(params.dout) + first);
  }
  // ---- multiply and write ----
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int64_t first = first_of(load);
    if (first >= params.size) continue;
    float dgate[VECTOR], dup[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float z = gate[load].at(i), gradient = dout[load].at(i);
      const float slope = slope_scaled<ACTIVATION>(ARGUMENT_SCALE<ACTIVATION> * z);
      dgate[i] = gradient * up[load].at(i) * slope;
      dup[i] = gradient * activate<ACTIVATION>(z);
    }
    store_words<VECTOR>(static_cast<T*>(params.dgate) + first, round_words<T>(dgate));
    store_words<VECTOR>(static_cast<T*>(params.dup) + first, round_words<T>(dup));
  }
}
