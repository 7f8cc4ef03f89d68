// tanh for four scores at a time, by one reciprocal. A multiprocessor computes eight products in
// the time of one reciprocal or exponential.
#pragma once
#include "../../ptx/math.cuh"

namespace text {

// tanh_of_log2() of each number, by the reciprocal of the product of the four divisors. The product
// is finite, because tanh is 1 long before 2^30. (e - 1) / (e + 1) in the place of 1 - 2 / (e + 1)
// has no error where tanh is 0, which makes up for three more roundings.
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

}  // namespace text
