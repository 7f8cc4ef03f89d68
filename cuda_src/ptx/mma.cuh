// mma.sync: D += A * B on 16x8 tiles of a warp, float32 accumulators.
// PTX ISA: "Warp-level matrix instructions: mma", fragments of m16n8k16 and m16n8k8.
//
// Lane 4 g + c holds columns 2c and 2c + 1 of two rows of the accumulator: row g in d[0] and d[1],
// row g + 8 in d[2] and d[3]. It holds these elements of A, for k16:
//   a[0]  row g,     k = 2c, 2c + 1      a[2]  row g,     k = 2c + 8, 2c + 9
//   a[1]  row g + 8, k = 2c, 2c + 1      a[3]  row g + 8, k = 2c + 8, 2c + 9
// So two neighbouring accumulators, rounded to 16 bits, are an A operand without any exchange
// between lanes.
#pragma once
#include "../common/types.cuh"

// sm_75 has the instruction for float16 with k = 8 only, so a step of k = 16 takes two of them.
template <typename T, int ARCH>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  constexpr bool IS_HALF = !T::IS_BFLOAT16;
  static_assert(ARCH >= 80 || IS_HALF, "sm_75 has no bfloat16 mma");
  if constexpr (ARCH < 80) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
  } else if constexpr (IS_HALF) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
