// Activation functions and their derivatives in float32, from single-instruction exponentials.
#pragma once
#include "../ptx/math.cuh"

enum Activation { none, silu, mish, gelu, gelu_tanh, relu };

constexpr float SQRT_HALF = 0.70710678f;
constexpr float INV_SQRT_2PI = 0.39894228f;
constexpr float GELU_SCALE = 0.79788456f;  // sqrt(2 / pi)
constexpr float GELU_CUBIC = 0.044715f;

__device__ __forceinline__ float sigmoid(float z) {
  return rcp_approx(1.f + exp2_approx(-LOG2E * z));
}

// exp(z), where larger values would not change what mish makes of it.
__device__ __forceinline__ float exp_bounded(float z) {
  return exp2_approx(LOG2E * fminf(z, 20.f));
}

template <Activation ACTIVATION>
__device__ __forceinline__ float activate(float z) {
  if constexpr (ACTIVATION == silu) {
    return z * sigmoid(z);
  } else if constexpr (ACTIVATION == mish) {
    // tanh(log(1 + e)) = n / (n + 2) with n = e * (e + 2)
    const float e = exp_bounded(z), n = e * (e + 2.f);
    return z * n * rcp_approx(n + 2.f);
  } else if constexpr (ACTIVATION == gelu) {
    return 0.5f * z * (1.f + erff(SQRT_HALF * z));
  } else if constexpr (ACTIVATION == gelu_tanh) {
    // (1 + tanh(u)) / 2 = sigmoid(2 u)
    return z * sigmoid(2.f * GELU_SCALE * (z + GELU_CUBIC * z * z * z));
  } else if constexpr (ACTIVATION == relu) {
    return z < 0.f ? 0.f : z;  // a NaN stays one
  } else {
    return z;
  }
}

template <Activation ACTIVATION>
__device__ __forceinline__ float activation_slope(float z) {
  if constexpr (ACTIVATION == silu) {
    const float s = sigmoid(z);
    return s * (1.f + z * (1.f - s));
  } else if constexpr (ACTIVATION == mish) {
    // With t = n / (n + 2): t + z * (1 - t * t) * e / (1 + e), and n + 1 = (e + 1)^2.
    const float e = exp_bounded(z), n = e * (e + 2.f), inverse = rcp_approx(n + 2.f);
    return n * inverse + z * (4.f * e * (1.f + e)) * inverse * inverse;
  } else if constexpr (ACTIVATION == gelu) {
    const float density = INV_SQRT_2PI * exp2_approx(-0.5f * LOG2E * z * z);
    return 0.5f * (1.f + erff(SQRT_HALF * z)) + z * density;
  } else if constexpr (ACTIVATION == gelu_tanh) {
    const float s = sigmoid(2.f * GELU_SCALE * (z + GELU_CUBIC * z * z * z));
    const float slope = 2.f * GELU_SCALE * (1.f + 3.f * GELU_CUBIC * z * z);
    return s + z * s * (1.f - s) * slope;
  } else if constexpr (ACTIVATION == relu) {
    return z > 0.f ? 1.f : 0.f;
  } else {
    return 1.f;
  }
}
