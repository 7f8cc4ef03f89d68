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

// The largest argument of a tanh in this lane, |inner| * x, or infinity if the powers of `inner` do
// not fit float. NaN does not count.
template <int N>
__device__ __forceinline__ float largest_argument(const float (&s)[N][4], float inner) {
  float most[4] = {};  // one after the other, each maximum would wait for the one before
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i] = fmaxf(most[i], fabsf(s[n][i]));
  }
  inner = fabsf(inner);
  const float of_all = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
  return inner >= 1e-5f && inner <= 1e4f ? of_all * inner : INF;
}

// outer * tanh(inner * x) for small arguments, without exponentials and reciprocals: the odd
// polynomial of this degree with the least greatest error, which is 2e-8 of `outer`. The arguments
// of scores far below their cap are all small. NaN stays NaN.
//
// It is written in v = x^2 - limit, whose sign says whether x is small. So the signs of all v
// together tell afterwards whether it served, for half an instruction a score.
template <int DEGREE>
struct SmallTanh {
  static_assert(DEGREE == 5 || DEGREE == 7, "these have coefficients");
  static constexpr bool MAY_FAIL = true;
  static constexpr float LIMIT = DEGREE == 7 ? 0.4f : 0.22f;  // of the arguments
  // The polynomial in x^2 has the coefficients A, and that in v the coefficients B.
  static constexpr double A0 = DEGREE == 7 ? 0.99999957 : 0.99999936;
  static constexpr double A1 = DEGREE == 7 ? -0.33329726 : -0.33322652;
  static constexpr double A2 = DEGREE == 7 ? 0.13250567 : 0.12887798;
  static constexpr double A3 = DEGREE == 7 ? -0.04682574 : 0.;
  static constexpr double U = double(LIMIT) * LIMIT;
  static constexpr float B0 = float(A0 + U * (A1 + U * (A2 + U * A3)));
  static constexpr float B1 = float(A1 + U * (2 * A2 + U * 3 * A3));
  static constexpr float B2 = float(A2 + U * 3 * A3);
  static constexpr float B3 = float(A3);

  float limit;
  float c0, c1, c2, c3;
  int signs = -1;

  __device__ explicit SmallTanh(float inner, float outer = 1.f) {
    const float square = inner * inner;
    limit = float(U) * rcp_approx(square);
    outer *= inner;
    c0 = outer * B0;
    c1 = outer * square * B1;
    c2 = outer * square * square * B2;
    c3 = outer * square * square * square * B3;
  }

  // Whether all arguments so far were small. A NaN was not.
  __device__ bool served() const { return signs < 0; }

  __device__ float operator()(float x) { return scaled(x, 0, 0, 1.f, 0.f); }

  // As a term of RowState::update_at_old_max(), whose scores are S then. A cap keeps scores from
  // being huge, so the scale is a part of `outer`.
  __device__ float scaled(float x, int, int, float, float offset) {
    const float v = x * x - limit;
    signs &= __float_as_int(v);
    const float quadratic = DEGREE == 7 ? fmaf(c3, v, c2) : c2;
    return x * fmaf(fmaf(quadratic, v, c1), v, c0) - offset;
  }
  // ptxas would compute most polynomials before the first exponentials, so that these come at the
  // end, all at once. It cannot where the polynomials depend on an earlier weight, which is finite.
  __device__ void wait_for(float weight) { limit = fmaf(weight, 0.f, limit); }
};

// How far the scores of a tile are below their cap, and so which polynomial computes their tanh:
// that of degree 5, that of degree 7, or none.
enum class TanhSize { TINY, SMALL, LARGE };

// Follows the sizes of a warp from key tile to key tile. They begin anew with each query tile:
// otherwise the tiles that its block has had before would decide about last bits.
struct TanhSizes {
  static constexpr int FIRST = 2, AGAIN = 16;
  int to_check;

  __device__ __forceinline__ void begin() { to_check = FIRST; }

  // The size of the next tile. After enough tiny tiles in a row the next one is expected to be
  // tiny, without a look at its scores; if it is not, check_again() must be called.
  template <int N>
  __device__ __forceinline__ TanhSize expected(const float (&s)[N][4], float inner) {
    if (__all_sync(0xffffffffu, to_check == 0)) return TanhSize::TINY;
    const float most = largest_argument(s, inner);
    const bool tiny = __all_sync(0xffffffffu, most < SmallTanh<5>::LIMIT);
    to_check = tiny ? to_check - 1 : AGAIN;
    return __all_sync(0xffffffffu, most < SmallTanh<7>::LIMIT) ? TanhSize::SMALL : TanhSize::LARGE;
  }
  __device__ __forceinline__ void check_again() { to_check = AGAIN; }
};

}  // namespace text
