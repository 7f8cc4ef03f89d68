// The destinations of the products. A thread has one output of one sequence, and writes one copy of
// it. addend() loads the numbers that are added to a product, before the product is complete;
// store() writes the sum.
#pragma once
#include "../common/activation.cuh"
#include "inputs.cuh"
#include "steps.cuh"

// A number that orders logits: it is larger for a larger logit and for the first of equal ones, and
// the largest for a NaN.
__device__ __forceinline__ uint64_t ranked(float logit, int row) {
  const uint32_t bits = __float_as_uint(logit + 0.f);  // -0 is equal to 0
  const uint32_t order = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t(logit != logit ? 0xffffffffu : order) << 32 | (0xffffffffu - row);
}
// The row of the largest logit, or -1 if one is a NaN or infinity, or if all are -infinity.
__device__ __forceinline__ int row_of_ranked(uint64_t rank) {
  constexpr uint32_t LOWEST = 0x007fffff, HIGHEST = 0xff800000;  // the infinities
  const uint32_t order = rank >> 32;
  return order > LOWEST && order < HIGHEST ? int(0xffffffffu - static_cast<uint32_t>(rank)) : -1;
}

template <typename T>
struct Addend {
  T bias = {};
  float before = 0.f;

  __device__ float value() const { return to_float(bias) + before; }
};

template <typename T>
struct DecodeOutput {
  const DecodeStackParams& params;
  const int (&keys)[MAX_BATCH];
  const Step& step;
  const void* bias;  // or null
  uint64_t& best;    // the largest ranked() logit of this thread, all of one sequence
  int copy;          // the copy that this thread writes of words that all blocks read

  // The residual needs no receive(): a block has the same rows of it in all steps, and has written
  // them itself.
  __device__ Addend<T> addend(int row, int n) const {
    Addend<T> result;
    if (bias) result.bias = static_cast<const T*>(bias)[row];
    if (step.matrix == Matrix::proj || step.matrix == Matrix::down)
      result.before =
          step.segment ? ld_relaxed(segment_sum(row, n)) : untagged(ld_relaxed(residual(row, n)));
    return result;
  }

  __device__ void store(int row, int n, float value) const {
    switch (step.matrix) {
      case Matrix::qkv:
        return store_qkv(row, n, value);
      case Matrix::up:
        send(hidden_word(params, copy, n, row), activate<gelu_tanh>(value), step.tag);
        return;
      case Matrix::head:
        if (params.logits && copy == 0) params.logits[int64_t(n) * params.vocab + row] = value;
        best = max(best, ranked(value, row));
        return;
      case Matrix::proj:
        send(residual(row, n), value, step.residual_tag ^ 1);
        return;
      default:
        store_down(row, n, value);
    }
  }

 private:
  __device__ float* residual(int row, int n) const { return residual_word(params, copy, n, row); }
  __device__ float* segment_sum(int row, int n) const {
    return params.segment_sums + n * params.width + row;
  }

  // Sends q, k and v to the blocks of the attention; k and v go into the caches too.
  __device__ void store_qkv(int row, int n, float value) const {
    if (copy > 0) return;
    send(params.qkv + int64_t(n) * 3 * params.width + row, value, step.tag);
    if (row < params.width || keys[n] == 0) return;
    const bool is_key = row < 2 * params.width;
    const int column = row - (is_key ? params.width : 2 * params.width);
    const CacheStrides& strides = is_key ? params.k_strides : params.v_strides;
    T* cache = static_cast<T*>(is_key ? params.k_cache : params.v_cache);
    const int head = quotient(column, params.head_dim_inverse);
    const int64_t at = strides.at(step.layer, n, keys[n] - 1, head);
    cache[at + column - head * params.head_dim] = from_float<T>(value);
  }

  // Only the last segment replaces the residual. Other blocks may still read it until the whole
  // hidden layer is complete, and only the last segment has waited for all of that.
  __device__ void store_down(int row, int n, float value) const {
    if (step.segment + 1 < params.segments) {
      *segment_sum(row, n) = value;
      return;
    }
    send(residual(row, n), value, step.residual_tag);
    if (params.out && copy == 0 && step.layer + 1 == params.num_layers)
      static_cast<T*>(params.out)[n * params.width + row] = from_float<T>(value);
  }
};
