// wgmma.mma_async (sm_90a): D[64][N] += A[64][16] B[16][N], 16-bit inputs, float accumulators, by
// the 128 threads of a warpgroup. PTX ISA: "Asynchronous Warpgroup Level Matrix Instructions".
//
// Warp w of the warpgroup owns rows 16 w .. 16 w + 15 of D; within them d[n][i] is laid out as in
// mma.cuh: row lane / 4 + 8 (i / 2), column 8 n + lane % 4 * 2 + i % 2. B is always in shared
// memory; A is there too, or in registers (the fragments of mma.cuh). A descriptor says where an
// operand lies in shared memory.
//
// The products are asynchronous: the threads go on while those of a group run. Between
// wgmma_fence() and the wgmma_wait() that covers the group, no thread may touch the registers of D
// or A.
#pragma once
#include "../common/types.cuh"

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most N of the newest groups are pending.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving accesses to these registers across this point.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
  }
}
template <int K>
__device__ __forceinline__ void pin(uint32_t (&a)[K][4]) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[k][i])::"memory");
  }
}

// The matrix descriptor of an operand at a shared address. Its tile has rows of 128 or 64 bytes and
// the swizzle of that length. Eight rows form an atom, which is aligned to its size, and atoms
// follow each other down the rows. For an operand that lies transposed (its k index runs down the
// rows), leading_bytes is the distance to the next ROW_BYTES of columns; otherwise it is not used.
template <int ROW_BYTES>
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_bytes) {
  static_assert(ROW_BYTES == 128 || ROW_BYTES == 64, "the swizzles of wgmma that tiles have");
  constexpr uint64_t SWIZZLE = (ROW_BYTES == 128 ? 1ull : 2ull) << 62;
  constexpr uint64_t STRIDE_BYTES = 8 * ROW_BYTES;
  return SWIZZLE | STRIDE_BYTES / 16 << 32 | uint64_t(leading_bytes / 16) << 16 |
         (address / 16 & 0x3fff);
}

// One overload for each N, chosen by the size of d: the text of the instruction lists N / 2
// registers. REGS_x are the operand names 0 .. x - 1, ACC_x the operands of x columns of eight.
#define REGS_4 "%0, %1, %2, %3"
#define REGS_8 REGS_4 ", %4, %5, %6, %7"
#define REGS_16 REGS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGS_20 REGS_16 ", %16, %17, %18, %19"
#define REGS_24 REGS_20 ", %20, %21, %22, %23"
#define REGS_32 \
  REGS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGS_40 REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGS_48 REGS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGS_56 REGS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REGS_64 REGS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define REGS_72 REGS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define REGS_80 REGS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define REGS_88 REGS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define REGS_96 REGS_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define REGS_128                                                                               \
  REGS_96                                                                                      \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "   \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
  "%126, %127"

#define ACC_1(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define ACC_2(n) ACC_1(n), ACC_1(n + 1)
#define ACC_4(n) ACC_2(n), ACC_2(n + 2)
#define ACC_5(n) ACC_4(n), ACC_1(n + 4)
#define ACC_6(n) ACC_4(n), ACC_2(n + 4)
#define ACC_8(n) ACC_4(n), ACC_4(n + 4)
#define ACC_10(n) ACC_8(n), ACC_2(n + 8)
#define ACC_12(n) ACC_8(n), ACC_4(n + 8)
#define ACC_14(n) ACC_12(n), ACC_2(n + 12)
#define ACC_16(n) ACC_8(n), ACC_8(n + 8)
#define ACC_20(n) ACC_16(n), ACC_4(n + 16)
#define ACC_24(n) ACC_16(n), ACC_8(n + 16)
#define ACC_32(n) ACC_16(n), ACC_16(n + 16)

#define WGMMA_ASM(N, TYPE, REGS, A, B, SCALE, TRANS, ...)                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" SCALE                                       \
               ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGS "}, " A \
               ", %" B ", p, 1, 1, " TRANS ";\n}"                                               \
               : __VA_ARGS__)

// I0 .. I6 are the numbers of the operands that follow the accumulators.
#define WGMMA(N8, N, REGS, ACC, I0, I1, I2, I3, I4, I5, I6)                                    \
  template <typename T, int TRANS_A, int TRANS_B>                                              \
  __device__ __forceinline__ void wgmma(float (&d)[N8][4], uint64_t a, uint64_t b, int add) {  \
    if constexpr (T::IS_BFLOAT16) {                                                            \
      WGMMA_ASM(N, "bf16", REGS, "%" I0, I1, I2, "%" I3 ", %" I4, ACC(0) : "l"(a), "l"(b),     \
                "r"(add), "n"(TRANS_A), "n"(TRANS_B));                                         \
    } else {                                                                                   \
      WGMMA_ASM(N, "f16", REGS, "%" I0, I1, I2, "%" I3 ", %" I4, ACC(0) : "l"(a), "l"(b),      \
                "r"(add), "n"(TRANS_A), "n"(TRANS_B));                                         \
    }                                                                                          \
  }                                                                                            \
  template <typename T, int TRANS_B>                                                           \
  __device__ __forceinline__ void wgmma(float (&d)[N8][4], const uint32_t (&a)[4], uint64_t b, \
                                        int add) {                                             \
    if constexpr (T::IS_BFLOAT16) {                                                            \
      WGMMA_ASM(N, "bf16", REGS, "{%" I0 ", %" I1 ", %" I2 ", %" I3 "}", I4, I5, "%" I6,       \
                ACC(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add),         \
                "n"(TRANS_B));                                                                 \
    } else {                                                                                   \
      WGMMA_ASM(N, "f16", REGS, "{%" I0 ", %" I1 ", %" I2 ", %" I3 "}", I4, I5, "%" I6,        \
                ACC(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add),         \
                "n"(TRANS_B));                                                                 \
    }                                                                                          \
  }

// add = 0 overwrites d. TRANS_A and TRANS_B are 1 if the operand lies transposed in shared memory.
// clang-format off
WGMMA(1, "8", REGS_4, ACC_1, "4", "5", "6", "7", "8", "9", "10")
WGMMA(2, "16", REGS_8, ACC_2, "8", "9", "10", "11", "12", "13", "14")
WGMMA(4, "32", REGS_16, ACC_4, "16", "17", "18", "19", "20", "21", "22")
WGMMA(5, "40", REGS_20, ACC_5, "20", "21", "22", "23", "24", "25", "26")
WGMMA(6, "48", REGS_24, ACC_6, "24", "25", "26", "27", "28", "29", "30")
WGMMA(8, "64", REGS_32, ACC_8, "32", "33", "34", "35", "36", "37", "38")
WGMMA(10, "80", REGS_40, ACC_10, "40", "41", "42", "43", "44", "45", "46")
WGMMA(12, "96", REGS_48, ACC_12, "48", "49", "50", "51", "52", "53", "54")
WGMMA(14, "112", REGS_56, ACC_14, "56", "57", "58", "59", "60", "61", "62")
WGMMA(16, "128", REGS_64, ACC_16, "64", "65", "66", "67", "68", "69", "70")
WGMMA(20, "160", REGS_80, ACC_20, "80", "81", "82", "83", "84", "85", "86")
WGMMA(24, "192", REGS_96, ACC_24, "96", "97", "98", "99", "100", "101", "102")
WGMMA(32, "256", REGS_128, ACC_32, "128", "129", "130", "131", "132", "133", "134")
// clang-format on
