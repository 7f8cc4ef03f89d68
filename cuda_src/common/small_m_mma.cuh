// Products of many rows of weights with a few rows of x (small M), for linear/small_m.cuh and
// block/row_dot.cuh.
//
// 16 rows of weights at a time are operand A of mma.sync, and 8 rows of x are operand B. A sum over
// the depth may take its terms in any order that is the same for both operands. So a lane loads 16
// neighbouring bytes of each of its rows, and uses them without rearrangement as operands of two
// steps of k = 16. All loads have 16 bytes, and nothing is transposed.
#pragma once
#include "../ptx/mma.cuh"

// Whether mma.sync takes the type. sm_75 has none for bfloat16, and for float32 there is none that
// is exact.
template <typename T, int ARCH>
constexpr bool HAS_MMA = ARCH >= 80 || !T::IS_BFLOAT16;
template <int ARCH>
constexpr bool HAS_MMA<float, ARCH> = false;

// Does `step` 0 or 1 of the two steps. Lane 4 g + c passes the 16 bytes of its rows: `low` and
// `high` of rows g and g + 8 of the weights, and `x` of row g of x. d is the accumulator of
// mma.cuh.
template <typename T, int ARCH>
__device__ __forceinline__ void mma_step(float (&d)[4], const uint4& low, const uint4& high,
                                         const uint4& x, int step) {
  if (step == 0) {
    mma_m16n8k16<T, ARCH>(d, {low.x, high.x, low.y, high.y}, x.x, x.y);
  } else {
    mma_m16n8k16<T, ARCH>(d, {low.z, high.z, low.w, high.w}, x.z, x.w);
  }
}
