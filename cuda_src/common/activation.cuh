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

// The functions below take u = ARGUMENT_SCALE * z instead of z, because exp2 needs u. Where z is
// the result of a multiplication anyway, the caller folds the scale into its factor. They are right
// for every u that float32 holds (z up to 2.3e38 for silu and mish): where an activation is a
// constant or a line, only u itself may grow, and no product of u with a power of u or of 2^u.
template <Activation ACTIVATION>
constexpr float ARGUMENT_SCALE = ACTIVATION == silu   ? -LOG2E
                                 : ACTIVATION == mish ? LOG2E
                                                      : 1.f;

// The activation of z = u / ARGUMENT_SCALE.
template <Activation ACTIVATION>
__device__ __forceinline__ float activate_scaled(float u) {
  if constexpr (ACTIVATION == silu) {
    return u * rcp_approx(-LOG2E - LOG2E * exp2_approx(u));
  } else if constexpr (ACTIVATION == mish) {
    // tanh(log(1 + e)) = n / (n + 2) with n = e * (e + 2). From u = 28 on it is 1 in float32.
    const float e = exp2_approx(fminf(u, 28.f)), n = e * (e + 2.f);
    return u * (n * rcp_approx(LOG2E * n + 2.f * LOG2E));
  } else if constexpr (ACTIVATION == gelu) {
    return 0.5f * u * (1.f + erff(SQRT_HALF * u));
  } else if constexpr (ACTIVATION == gelu_tanh) {
    // (1 + tanh(u)) / 2 = sigmoid(2 u)
    return u * sigmoid(2.f * GELU_SCALE * (u + GELU_CUBIC * u * u * u));
  } else if constexpr (ACTIVATION == relu) {
    return u < 0.f ? 0.f : u;  // a NaN stays one
  } else {
    return u;
  }
}

template <Activation ACTIVATION>
__device__ __forceinline__ float activate(float z) {
  return activate_scaled<ACTIVATION>(ARGUMENT_SCALE<ACTIVATION> * z);
}

// The derivative of the activation with respect to z, at z = u / ARGUMENT_SCALE.
template <Activation ACTIVATION>
__device__ __forceinline__ float slope_scaled(float u) {
  if constexpr (ACTIVATION == silu) {
    // s * (1 + z * (1 - s))
    const float s = rcp_approx(1.f + exp2_approx(u));
    return s * (1.f + u * (LN2 * s - LN2));
  } else if constexpr (ACTIVATION == mish) {
    // With t = n / (n + 2): t + z * (1 - t * t) * e / (1 + e), and n + 1 = (e + 1)^2. Beyond
    // +-60 it is 0 or 1, and e * e must have a reciprocal.
    const float bounded = clamp_nan(u, 60.f), e = exp2_approx(bounded);
    const float rest = e * e + e, n = rest + e, inverse = rcp_approx(n + 2.f);
    return inverse * (n + (4.f * LN2 * bounded) * (rest * inverse));
  } else if constexpr (ACTIVATION == gelu) {
    const float density = INV_SQRT_2PI * exp2_approx(-0.5f * LOG2E * u * u);
    return 0.5f * (1.f + erff(SQRT_HALF * u)) + u * density;
  } else if constexpr (ACTIVATION == gelu_tanh) {
    // With s = 1 / (1 + e), 1 - s is s * e without the cancellation. Beyond +-9.9 it is 0 or 1;
    // there e is 2^123, which has a reciprocal.
    const float z = clamp_nan(u, 9.9f);
    const float e = exp2_approx(-2.f * LOG2E * GELU_SCALE * (z + GELU_CUBIC * z * z * z));
    const float s = rcp_approx(1.f + e);
    const float slope = 2.f * GELU_SCALE * (1.f + 3.f * GELU_CUBIC * z * z);
    return s + z * s * (s * e) * slope;
  } else if constexpr (ACTIVATION == relu) {
    return u <= 0.f ? 0.f : 1.f;
  } else {
    return 1.f;
  }
}
