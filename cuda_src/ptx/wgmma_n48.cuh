// The product of 48 columns, for the one kernel that has it. It must be included before
// wg_gemm.cuh, which finds the products that are declared before it.
#pragma once
#include "wgmma.cuh"

#define REGS_24 REGS_20 ", %20, %21, %22, %23"
#define ACC_6(n) ACC_4(n), ACC_2(n + 4)
WGMMA(6, "48", REGS_24, ACC_6, "24", "25", "26", "27", "28", "29", "30")
