// What becomes of the products. One thread has one output of one sequence: `addend` is what it adds
// to a product, read before that is there; `store` takes the sum.
#pragma once
#include "../common/activation.cuh"
#include "decode_inputs.cuh"
#include "decode_steps.cuh"

// The place of a logit in the order: larger for larger ones, of equal ones for the first; a NaN is
// the largest.
__device__ __forceinline__ uint64_t ranked(float logit, int row) {
  const uint32_t bits = __float_as_uint(logit + 0.f);  // -0 is equal to 0
  const uint32_t order = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t(logit != logit ? 0xffffffffu : order) << 32 | (0xffffffffu - row);
}
__device__ __forceinline__ int row_of_ranked(uint64_t rank) {
  return 0xffffffffu - static_cast<uint32_t>(rank);
}

template <typename T>
struct DecodeOutput {
  const DecodeStackParams& params;
  const int (&keys)[MAX_BATCH];
  const Step& step;
  const void* bias;  // or null
  uint64_t& best;    // `ranked` logit that this thread has seen, all of one sequence

  __device__ float addend(int row, int n) const {
    float value = bias ? to_float(static_cast<const T*>(bias)[row]) : 0.f;
    // A block has the same rows of the residual all the time.
    if (step.matrix == Matrix::proj || step.matrix == Matrix::down)
      value += ld_global_cg(params.residual + int64_t(n) * params.width + row);
    return value;
  }

  __device__ void store(int row, int n, float value) const {
    switch (step.matrix) {
      case Matrix::qkv:
        return store_qkv(row, n, value);
      case Matrix::up:
        static_cast<T*>(params.hidden)[int64_t(n) * params.hidden_width + row] =
            from_float<T>(activate<gelu_tanh>(value));
        return;
      case Matrix::head:
        if (params.logits) params.logits[int64_t(n) * params.vocab + row] = value;
        best = max(best, ranked(value, row));
        return;
      default:
        params.residual[int64_t(n) * params.width + row] = value;
        if (params.out && step.matrix == Matrix::down && step.layer + 1 == params.num_layers)
          static_cast<T*>(params.out)[int64_t(n) * params.width + row] = from_float<T>(value);
    }
  }

 private:
  // The query for the blocks of the attention, key and value into the caches.
  __device__ void store_qkv(int row, int n, float value) const {
    const int part = (row >= params.width) + (row >= 2 * params.width);
    const int column = row - part * params.width;
    if (part == 0) {
      params.query[int64_t(n) * params.width + column] = value;
    } else if (keys[n] > 0) {
      const CacheStrides& strides = part == 1 ? params.k_strides : params.v_strides;
      T* cache = static_cast<T*>(part == 1 ? params.k_cache : params.v_cache);
      const int head = quotient(column, params.head_dim_inverse);
      const int64_t at = strides.at(step.layer, n, keys[n] - 1, head);
      cache[at + column - head * params.head_dim] = from_float<T>(value);
    }
  }
};
