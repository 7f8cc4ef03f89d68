// The functions of a text (text.cuh), for float and for Dual: a number with its derivative by the
// score. The backward evaluates the text with Duals, so that nobody has to write a derivative.
//
// Where a text adds or multiplies by what does not depend on the score, the derivative of a Dual is
// a constant that the compiler sees, and costs nothing.
#pragma once
#include "../../ptx/math.cuh"

// Whether the functions are those of libm, which float32 needs. Otherwise they are single
// instructions around ex2 and rcp, whose errors are far below those of 16 bits.
#ifndef TEXT_IS_EXACT
#define TEXT_IS_EXACT false
#endif

namespace text {

struct Dual {
  float value;
  float slope;

  Dual() = default;
  __device__ __forceinline__ Dual(float value) : value(value), slope(0.f) {}
  __device__ __forceinline__ Dual(float value, float slope) : value(value), slope(slope) {}
  __device__ explicit operator int() const { return int(value); }
  __device__ explicit operator float() const { return value; }
  __device__ explicit operator bool() const { return value != 0.f; }
};

// ---- floats ----

__device__ __forceinline__ float divide(float a, float b) {
  return TEXT_IS_EXACT ? a / b : a * rcp_approx(b);
}
// a / b of what does not depend on the score, which a floor, a cast or a comparison may take apart:
// what a times 1 / b misses is added, so that whole quotients are whole. Where that is NaN (b is 0
// or infinite), nothing is missed.
__device__ __forceinline__ float quotient(float a, float b) {
  if (TEXT_IS_EXACT) return a / b;
  const float inverse = rcp_approx(b), rough = a * inverse;
  const float fine = fmaf(fmaf(-rough, b, a), inverse, rough);
  return fine == fine ? fine : rough;
}
__device__ __forceinline__ float exp2(float x) { return TEXT_IS_EXACT ? exp2f(x) : exp2_approx(x); }
__device__ __forceinline__ float exp(float x) {
  return TEXT_IS_EXACT ? expf(x) : exp2_approx(x * LOG2E);
}
__device__ __forceinline__ float log2(float x) { return log2f(x); }
__device__ __forceinline__ float log(float x) { return logf(x); }
__device__ __forceinline__ float tanh(float x) { return TEXT_IS_EXACT ? tanhf(x) : tanh_exp2(x); }
__device__ __forceinline__ float sigmoid(float x) { return divide(1.f, 1.f + exp(-x)); }
// The residual of the approximate root is added, so that the roots of squares are whole numbers.
// For 0 and infinity the residual is NaN, and the approximate root is right already.
__device__ __forceinline__ float sqrt(float x) {
  if (TEXT_IS_EXACT) return sqrtf(x);
  const float rough = sqrt_approx(x);
  const float fine = fmaf(fmaf(-rough, rough, x), 0.5f * rcp_approx(rough), rough);
  return fine == fine ? fine : rough;
}
__device__ __forceinline__ float rsqrt(float x) { return divide(1.f, sqrt(x)); }
__device__ __forceinline__ float floor(float x) { return floorf(x); }
__device__ __forceinline__ float erf(float x) { return erff(x); }
__device__ __forceinline__ float pow(float x, float y) { return powf(x, y); }

// Subtracts whole turns in two parts, of which the first has few digits, so that its product with
// the number of turns is exact. The sine of CUDA would put a table for huge angles on the stack.
__device__ __forceinline__ float within_turn(float x) {
  const float turns = rintf(x * (0.5f / PI));
  return (x - turns * 6.28125f) - turns * 1.9353071795864769e-3f;
}
__device__ __forceinline__ float sin(float x) { return sin_approx(within_turn(x)); }
__device__ __forceinline__ float cos(float x) { return cos_approx(within_turn(x)); }

// ---- Duals ----

__device__ __forceinline__ Dual operator-(Dual a) { return {-a.value, -a.slope}; }
__device__ __forceinline__ Dual operator+(Dual a, Dual b) {
  return {a.value + b.value, a.slope + b.slope};
}
__device__ __forceinline__ Dual operator+(Dual a, float b) { return {a.value + b, a.slope}; }
__device__ __forceinline__ Dual operator+(float a, Dual b) { return {a + b.value, b.slope}; }
__device__ __forceinline__ Dual operator-(Dual a, Dual b) {
  return {a.value - b.value, a.slope - b.slope};
}
__device__ __forceinline__ Dual operator-(Dual a, float b) { return {a.value - b, a.slope}; }
__device__ __forceinline__ Dual operator-(float a, Dual b) { return {a - b.value, -b.slope}; }
__device__ __forceinline__ Dual operator*(Dual a, Dual b) {
  return {a.value * b.value, a.slope * b.value + a.value * b.slope};
}
__device__ __forceinline__ Dual operator*(Dual a, float b) { return {a.value * b, a.slope * b}; }
__device__ __forceinline__ Dual operator*(float a, Dual b) { return {a * b.value, a * b.slope}; }
__device__ __forceinline__ Dual divide(Dual a, Dual b) {
  const float quotient = divide(a.value, b.value);
  return {quotient, divide(a.slope - quotient * b.slope, b.value)};
}
__device__ __forceinline__ Dual divide(Dual a, float b) {
  return {divide(a.value, b), divide(a.slope, b)};
}
__device__ __forceinline__ Dual divide(float a, Dual b) {
  const float quotient = divide(a, b.value);
  return {quotient, divide(-quotient * b.slope, b.value)};
}
// Where the derivative is that by a capture.
__device__ __forceinline__ Dual quotient(Dual a, Dual b) {
  const float value = quotient(a.value, b.value);
  return {value, divide(a.slope - value * b.slope, b.value)};
}
__device__ __forceinline__ Dual operator/(Dual a, Dual b) { return divide(a, b); }
__device__ __forceinline__ Dual operator/(Dual a, float b) { return divide(a, b); }
__device__ __forceinline__ Dual operator/(float a, Dual b) { return divide(a, b); }

__device__ __forceinline__ bool operator<(Dual a, Dual b) { return a.value < b.value; }
__device__ __forceinline__ bool operator<=(Dual a, Dual b) { return a.value <= b.value; }
__device__ __forceinline__ bool operator>(Dual a, Dual b) { return a.value > b.value; }
__device__ __forceinline__ bool operator>=(Dual a, Dual b) { return a.value >= b.value; }
__device__ __forceinline__ bool operator==(Dual a, Dual b) { return a.value == b.value; }
__device__ __forceinline__ bool operator!=(Dual a, Dual b) { return a.value != b.value; }

__device__ __forceinline__ Dual exp2(Dual x) {
  const float y = exp2(x.value);
  return {y, y * LN2 * x.slope};
}
__device__ __forceinline__ Dual exp(Dual x) {
  const float y = exp(x.value);
  return {y, y * x.slope};
}
// The logarithm of 0 masks, and has no gradient.
__device__ __forceinline__ Dual log(Dual x) {
  return {log(x.value), x.value == 0.f ? 0.f : divide(x.slope, x.value)};
}
__device__ __forceinline__ Dual log2(Dual x) {
  return {log2(x.value), x.value == 0.f ? 0.f : divide(x.slope * LOG2E, x.value)};
}
__device__ __forceinline__ Dual tanh(Dual x) {
  const float y = tanh(x.value);
  return {y, (1.f - y * y) * x.slope};
}
__device__ __forceinline__ Dual sigmoid(Dual x) {
  const float y = sigmoid(x.value);
  return {y, y * (1.f - y) * x.slope};
}
__device__ __forceinline__ Dual sqrt(Dual x) {
  const float y = sqrt(x.value);
  return {y, divide(0.5f * x.slope, y)};
}
__device__ __forceinline__ Dual rsqrt(Dual x) {
  const float y = rsqrt(x.value);
  return {y, -0.5f * y * y * y * x.slope};
}
__device__ __forceinline__ Dual sin(Dual x) { return {sin(x.value), cos(x.value) * x.slope}; }
__device__ __forceinline__ Dual cos(Dual x) { return {cos(x.value), -sin(x.value) * x.slope}; }
__device__ __forceinline__ Dual floor(Dual x) { return floor(x.value); }
__device__ __forceinline__ Dual erf(Dual x) {
  return {erf(x.value), 1.1283791670955126f * exp(-x.value * x.value) * x.slope};
}
__device__ __forceinline__ Dual pow(Dual x, float y) {
  return {pow(x.value, y), y == 0.f ? 0.f : y * pow(x.value, y - 1.f) * x.slope};
}
__device__ __forceinline__ Dual pow(float x, Dual y) {
  const float z = pow(x, y.value);
  return {z, y.slope == 0.f || (x == 0.f && y.value >= 0.f) ? 0.f : z * log(x) * y.slope};
}
__device__ __forceinline__ Dual pow(Dual x, Dual y) {
  const Dual of_base = pow(x, y.value);
  return {of_base.value, of_base.slope + pow(x.value, y).slope};
}

// ---- numbers of any kind ----

// A power by products. The exponent is a constant, so the loop is not left.
template <class N>
__device__ __forceinline__ N pow(N x, int exponent) {
  N y = 1;
  for (int bits = exponent < 0 ? -exponent : exponent; bits != 0; bits /= 2) {
    if (bits % 2) y = y * x;
    x = x * x;
  }
  return exponent < 0 ? N(divide(1.f, y)) : y;
}

// The type of a result that is one number or another.
template <class A, class B>
using Either = decltype(A() + B());

template <class A, class B>
__device__ __forceinline__ Either<A, B> where(bool condition, A a, B b) {
  return condition ? Either<A, B>(a) : Either<A, B>(b);
}
// Either one as NaN gives NaN. Equal numbers have the derivative of the second one.
using ::max_nan;
using ::min_nan;
__device__ __forceinline__ Dual max_nan(Dual a, Dual b) {
  return {max_nan(a.value, b.value), a.value > b.value ? a.slope : b.slope};
}
__device__ __forceinline__ Dual min_nan(Dual a, Dual b) {
  return {min_nan(a.value, b.value), a.value < b.value ? a.slope : b.slope};
}
__device__ __forceinline__ int max_nan(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int min_nan(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int64_t max_nan(int64_t a, int64_t b) { return a > b ? a : b; }
__device__ __forceinline__ int64_t min_nan(int64_t a, int64_t b) { return a < b ? a : b; }

template <class A, class B>
__device__ __forceinline__ Either<A, B> max(A a, B b) {
  return max_nan(Either<A, B>(a), Either<A, B>(b));
}
template <class A, class B>
__device__ __forceinline__ Either<A, B> min(A a, B b) {
  return min_nan(Either<A, B>(a), Either<A, B>(b));
}
template <class N, class Low, class High>
__device__ __forceinline__ auto clamp(N x, Low low, High high) {
  return min(max(x, low), high);
}
template <class N>
__device__ __forceinline__ N relu(N x) {
  return where(!(x <= N(0)), x, N(0));
}
__device__ __forceinline__ float abs(float x) { return fabsf(x); }
__device__ __forceinline__ int abs(int x) { return x < 0 ? -x : x; }
__device__ __forceinline__ int64_t abs(int64_t x) { return x < 0 ? -x : x; }
__device__ __forceinline__ Dual abs(Dual x) {
  return {fabsf(x.value), x.value > 0.f ? x.slope : x.value < 0.f ? -x.slope : 0.f};
}

// Quotient and remainder as Python has them: the remainder has the sign of the divisor.
template <class A, class B>
__device__ __forceinline__ auto floor_div(A a, B b) {
  const auto quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}
__device__ __forceinline__ float floor_div(float a, float b) { return floorf(a / b); }
__device__ __forceinline__ float floor_div(float a, int b) { return floorf(a / float(b)); }
__device__ __forceinline__ float floor_div(int a, float b) { return floorf(float(a) / b); }
__device__ __forceinline__ Dual floor_div(Dual a, Dual b) { return floor(a / b); }
template <class A, class B>
__device__ __forceinline__ auto mod(A a, B b) {
  return a - floor_div(a, b) * b;
}

}  // namespace text
