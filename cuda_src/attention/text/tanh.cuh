// tanh of scores with few reciprocals and exponentials. A multiprocessor computes eight products in
// the time of one of these.
#pragma once
#include "../../ptx/math.cuh"

namespace text {

// tanh_of_log2() of each of four numbers, by the reciprocal of the product of the four divisors.
// The product is finite, because tanh is 1 long before 2^30. (e - 1) / (e + 1) in the place of 1 -
// 2 / (e + 1) has no error where tanh is 0, which makes up for three more roundings.
//
// A NaN makes all four NaN, or without `keeps_nan` counts as infinity.
__device__ __forceinline__ void tanh_of_four_log2(float (&x)[4], bool keeps_nan) {
  float divisor[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = exp2_approx(keeps_nan ? min_nan(x[i], 30.f) : fminf(x[i], 30.f));
    divisor[i] = 1.f + x[i];
  }
  const float first = divisor[0] * divisor[1], last = divisor[2] * divisor[3];
  const float inverse = rcp_approx(first * last);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float of_pair = inverse * (i < 2 ? last : first);
    const float of_one = of_pair * divisor[i ^ 1];
    x[i] = fmaf(x[i], of_one, -of_one);
  }
}

// outer * tanh(inner * x) for small arguments, without exponentials and reciprocals: the odd
// polynomial of degree 7 with the least greatest error, which is 1.9e-8 of `outer`. The
// arguments of scores far below their cap are all small.
struct SmallTanh {
  static constexpr float LIMIT = 0.4f;                // of the arguments
  static constexpr float LEAST = 1e-5f, MOST = 1e4f;  // of `inner`, whose powers must fit float
  float c1, c3, c5, c7;

  __device__ explicit SmallTanh(float inner, float outer = 1.f) {
    const float square = inner * inner;
    outer *= inner;
    c1 = outer * 0.99999957f;
    c3 = outer * square * -0.33329726f;
    c5 = outer * square * square * 0.13250567f;
    c7 = outer * square * square * square * -0.04682574f;
  }

  // Whether it serves all scores of a warp. NaN stays NaN.
  template <int N>
  __device__ __forceinline__ static bool serves(const float (&s)[N][4], float inner) {
    float most = 0.f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(s[n][i]));
    }
    inner = fabsf(inner);
    return __all_sync(0xffffffffu, inner >= LEAST && inner <= MOST && most * inner < LIMIT);
  }

  __device__ float operator()(float x) const { return scaled(x, 0, 0, 1.f, 0.f); }

  // As a term of RowState::update_at_old_max(), whose scores are S then. A cap keeps scores from
  // being huge, so the scale is a part of `outer`.
  __device__ float scaled(float x, int, int, float, float offset) const {
    const float u = x * x;
    return x * fmaf(fmaf(fmaf(c7, u, c5), u, c3), u, c1) - offset;
  }
};

}  // namespace text
