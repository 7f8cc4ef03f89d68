// Sums of float32 numbers without any rounding, so that the order of the numbers does not matter.
//
// A float32 is a whole number of units of 2^-149, below 2^277. The sum of such numbers is kept in
// limbs of 64 bits, as sum over i of limbs[i] * 2^(64 i) with limbs that have a sign. A number
// changes one limb or two neighbours; where a limb leaves its range, a carry of 1 or -1 goes to the
// next. The top limb leaves room for 2^42 numbers of any size. Around zero, limbs change
// their sign without a carry.
#pragma once
#include "../../ptx/atomics.cuh"

constexpr int EXACT_LIMBS = 5;

// Zeros are an empty sum.
struct ExactSum {
  uint64_t limbs[EXACT_LIMBS];
  float not_finite;  // the sum of infinities and NaNs, whose order does not matter either
};

// Adds a number, as other threads may do at the same time.
__device__ __forceinline__ void red_add(ExactSum* sum, float x) {
  const uint32_t bits = __float_as_uint(x);
  const int exponent = bits >> 23 & 0xff;
  if (exponent == 0xff) return red_add(&sum->not_finite, x);
  const uint64_t digits = (bits & 0x7fffff) | (exponent == 0 ? 0 : 0x800000);
  if (digits == 0) return;
  const bool negative = bits >> 31;
  const int place = max(exponent, 1) - 1;  // that of its last bit
  const int shift = place % 64;
  uint64_t part = digits << shift;
  uint64_t next = shift > 40 ? digits >> (64 - shift) : 0;
#pragma unroll 1
  for (int limb = place / 64; limb < EXACT_LIMBS && (part | next) != 0; ++limb) {
    // From 0 on, so that the limb leaves its range where this number does.
    const uint64_t before = atom_add(&sum->limbs[limb], negative ? -part : part) + (1ull << 63);
    const bool carry = negative ? before < part : before + part < part;
    part = next + carry;
    next = 0;
  }
}

// The float32 next to the sum; of two, the even one.
__device__ inline float rounded(const ExactSum& sum) {
  if (sum.not_finite != 0.f) return sum.not_finite;

  // ---- the magnitude, in limbs without a sign ----
  uint64_t limbs[EXACT_LIMBS];
  int64_t carry = 0;  // 0 or -1
#pragma unroll
  for (int i = 0; i < EXACT_LIMBS; ++i) {
    const int64_t limb = sum.limbs[i];
    limbs[i] = uint64_t(limb) + uint64_t(carry);
    carry = limb < -carry ? -1 : 0;
  }
  const bool negative = carry != 0;
  uint64_t plus = negative;
#pragma unroll
  for (int i = 0; i < EXACT_LIMBS; ++i) {
    limbs[i] = (negative ? ~limbs[i] : limbs[i]) + plus;
    plus = plus && limbs[i] == 0;
  }

  // ---- the highest limb that is not zero, the next one, and whether there is more ----
  uint64_t high = limbs[0], low = 0, others = 0, below = 0;
  int first = 0;  // the place of the last bit of `high`
#pragma unroll
  for (int i = 1; i < EXACT_LIMBS; ++i) {
    if (limbs[i] != 0) high = limbs[i], low = limbs[i - 1], others = below, first = 64 * i;
    below |= limbs[i - 1];
  }

  // ---- the bits of the float ----
  // A whole number of 24 digits at the most is denormal or has the least exponent. It is its own
  // bits.
  uint32_t bits = high;
  if (first != 0 || high >> 24 != 0) {
    const int zeros = __clzll(high);
    const int top = first + 63 - zeros;  // the place of the highest bit
    if (zeros != 0) {
      high = high << zeros | low >> (64 - zeros);
      low <<= zeros;
    }
    const uint64_t rest = high << 24 | ((low | others) != 0);
    const uint32_t digits = high >> 40;
    const bool up = rest > 1ull << 63 || (rest == 1ull << 63 && digits % 2 != 0);
    // The highest of the 24 digits counts the exponent on by one, and so does a carry of `up`.
    bits = top > 276 ? 0x7f800000 : (uint32_t(top - 23) << 23) + digits + up;
  }
  return __uint_as_float(bits | uint32_t(negative) << 31);
}
