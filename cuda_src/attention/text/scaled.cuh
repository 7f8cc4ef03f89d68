// The score as the forward gives it to a text, so that factors of a row are multiplied once for a
// tile, and not for each element.
#pragma once
#include "dual.cuh"

namespace text {

// A number times a factor that many elements share. Products with what they share change the
// factor; any other operation takes the product, as a part of a multiply-add where it can.
struct Scaled {
  float x;
  float factor;

  Scaled() = default;
  __device__ __forceinline__ Scaled(float x) : x(x), factor(1.f) {}
  __device__ __forceinline__ Scaled(float x, float factor) : x(x), factor(factor) {}
  __device__ __forceinline__ operator float() const { return x * factor; }
};

__device__ __forceinline__ Scaled operator-(Scaled a) { return {a.x, -a.factor}; }
__device__ __forceinline__ Scaled operator*(Scaled a, float b) { return {a.x, a.factor * b}; }
__device__ __forceinline__ Scaled operator*(float a, Scaled b) { return b * a; }
__device__ __forceinline__ Scaled operator*(Scaled a, int b) { return a * float(b); }
__device__ __forceinline__ Scaled operator*(int a, Scaled b) { return b * float(a); }
__device__ __forceinline__ float operator*(Scaled a, Scaled b) { return float(a) * float(b); }
__device__ __forceinline__ Scaled divide(Scaled a, float b) {
  return TEXT_IS_EXACT ? Scaled(float(a) / b) : a * rcp_approx(b);
}
__device__ __forceinline__ float exp2(Scaled a) { return exp2(float(a)); }
__device__ __forceinline__ float exp(Scaled a) {
  return TEXT_IS_EXACT ? exp(float(a)) : exp2_approx(a * LOG2E);
}
__device__ __forceinline__ float tanh(Scaled a) {
  return TEXT_IS_EXACT ? tanh(float(a)) : tanh_of_log2(a * (2.f * LOG2E));
}
__device__ __forceinline__ float sigmoid(Scaled a) { return divide(1.f, 1.f + exp(-a)); }
__device__ __forceinline__ float pow(Scaled a, float b) { return pow(float(a), b); }

}  // namespace text
