// Captures that learn: their gradients are sums of dS * (derivative of the score by what was read).
// The text is evaluated with Duals whose derivative is that by one of its reads.
#pragma once
#include "../../ptx/atomics.cuh"
#include "captures.cuh"
#include "dual.cuh"
#include "exact_sum.cuh"

// What the gradient of an element is summed in: a float32, in the order in which threads come, or
// an exact sum, where every order gives the same bits.
#ifdef EXACT_GRADIENTS
using GradientElement = ExactSum;
#else
using GradientElement = float;
#endif

// Takes the place of Capture in a text. The read number `seed` of this capture gets the derivative
// 1, and leaves the address of its gradient; all others have the derivative 0.
template <typename T, int RANK>
struct LearningCapture {
  static constexpr int AXES = RANK > 0 ? RANK : 1;
  const T* data;
  int64_t strides[AXES];  // in bytes
  GradientElement* gradient;
  int gradient_strides[2 * AXES];
  // Of one evaluation, in a copy.
  mutable int seed;
  mutable int reads;
  mutable GradientElement* read;

  __device__ __forceinline__ void start(int seeded) const {
    seed = seeded;
    reads = 0;
    read = gradient;
  }

  template <class... Index>
  __device__ __forceinline__ text::Dual operator()(Index... index) const {
    int64_t to = 0;
    int axis = 0;
    ((to += int64_t(int(index)) * gradient_strides[2 * axis++]), ...);
    const bool seeded = reads++ == seed;
    if (seeded) read = gradient + to;
    return text::Dual(value(index...), seeded ? 1.f : 0.f);
  }

 private:
  template <class... Index>
  __device__ __forceinline__ auto value(Index... index) const {
    if constexpr (RANK == 0) {
      return captured(*data);
    } else {
      return captured(element(data, strides, index...));
    }
  }
};

// The sum of a thread for the element that it has read last. A slope of a head, or a table at its
// ends, is read many times in a row.
struct GradientSum {
  GradientElement* to = nullptr;
  float sum = 0.f;

  __device__ __forceinline__ void add(GradientElement* address, float x) {
    if (address != to) {
      flush();
      to = address;
      sum = 0.f;
    }
    sum += x;
  }
  __device__ __forceinline__ void flush() const {
    if (to) red_add(to, sum);
  }
};
