// Products of many rows of weights with a few rows of x: what linear/small_m.cuh and
// decode/row_dot.cuh share.
//
// The rows of weights are A of mma.sync, 16 at a time, and the rows of x are B, 8 at a time. The
// order of the depth in a sum is free, as long as both operands have the same one: so a lane loads
// 16 neighbouring bytes of each of its rows, and these are the operands of two k16 steps as they
// are. All loads are of 16 bytes, and none is transposed.
#pragma once
#include "../ptx/mma.cuh"

// Whether mma.sync takes the type: sm_75 has no bfloat16 one, and float32 has none that is exact.
template <typename T, int ARCH>
constexpr bool HAS_MMA = ARCH >= 80 || !T::IS_BFLOAT16;
template <int ARCH>
constexpr bool HAS_MMA<float, ARCH> = false;

// One of the two k16 steps (0 or 1) in 16 bytes of each lane: lane 4 g + c has `low` and `high` of
// rows g and g + 8 of the weights, and `x` of row g of x; d is the accumulator of mma.cuh.
template <typename T, int ARCH>
__device__ __forceinline__ void mma_step(float (&d)[4], const uint4& low, const uint4& high,
                                         const uint4& x, int step) {
  if (step == 0) {
    mma_m16n8k16<T, ARCH>(d, {low.x, high.x, low.y, high.y}, x.x, x.y);
  } else {
    mma_m16n8k16<T, ARCH>(d, {low.z, high.z, low.w, high.w}, x.z, x.w);
  }
}
