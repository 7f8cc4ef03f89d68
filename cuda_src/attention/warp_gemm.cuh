// Matrix products of one warp on mma.sync m16n8k16, for the sm_80 kernels. ldmatrix loads the
// operands from a SmemTile.
//
// An operand is named by how it lies in shared memory: a row operand has the summation index k
// along the rows of the tile (contiguous), a column operand has k running down the rows. ldmatrix
// reads both, the second with .trans.
#pragma once
#include "../common/smem_tile.cuh"
#include "../ptx/mma.cuh"

// This lane's addresses for the steps of 16 columns in a warp's part [col, col + WIDTH) of a tile.
// They take one register if each step is an XOR away from the first, else one register a step.
template <class Tile, int WIDTH>
struct ColumnSteps {
  static constexpr bool ALIGNED =
      WIDTH == Tile::COLS || WIDTH % Tile::BLOCK_COLS == 0 || Tile::BLOCK_COLS % WIDTH == 0;
  uint32_t address[ALIGNED ? 1 : WIDTH / 16];

  __device__ ColumnSteps(uint32_t smem, int row, int chunk) {
#pragma unroll
    for (int i = 0; i < (ALIGNED ? 1 : WIDTH / 16); ++i) {
      address[i] = smem + Tile::offset(row, chunk + 2 * i);
    }
  }

  __device__ uint32_t at(int rows, int step) const {
    return ALIGNED ? Tile::advance(address[0], rows, 2 * step)
                   : Tile::advance(address[step], rows, 0);
  }
};

// Operand A[16 M rows from `row` on][k]: the rows of the product are rows of the tile.
template <class Tile>
struct RowOperandA {
  uint32_t address;
  __device__ RowOperandA(uint32_t smem, int row)
      : address(smem + Tile::offset(row + threadIdx.x % 16, threadIdx.x % 32 / 16)) {}
  __device__ void load(uint32_t (&a)[4], int m, int k) const {
    ldmatrix_x4(a, Tile::advance(address, m * 16, k * 2));
  }
};

// Operand A[k][WIDTH columns from `col` on]: the rows of the product are columns of the tile.
template <class Tile, int WIDTH>
struct ColumnOperandA {
  ColumnSteps<Tile, WIDTH> steps;
  __device__ ColumnOperandA(uint32_t smem, int col)
      : steps(smem, threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8, col / 8 + threadIdx.x / 8 % 2) {}
  __device__ void load(uint32_t (&a)[4], int m, int k) const {
    ldmatrix_x4_trans(a, steps.at(k * 16, m));
  }
};

// Operand B[n][k]. A load brings 16 n: registers 0 and 1 are for columns 0 to 7 of the product, 2
// and 3 for columns 8 to 15.
template <class Tile>
struct RowOperandB {
  uint32_t address;
  __device__ RowOperandB(uint32_t smem, int row)
      : address(smem + Tile::offset(row + threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8,
                                    threadIdx.x / 8 % 2)) {}
  __device__ void load(uint32_t (&b)[4], int n, int k) const {
    ldmatrix_x4(b, Tile::advance(address, n * 16, k * 2));
  }
};

// Operand B[k][WIDTH columns from `col` on].
template <class Tile, int WIDTH>
struct ColumnOperandB {
  ColumnSteps<Tile, WIDTH> steps;
  __device__ ColumnOperandB(uint32_t smem, int col)
      : steps(smem, threadIdx.x % 16, col / 8 + threadIdx.x % 32 / 16) {}
  __device__ void load(uint32_t (&b)[4], int n, int k) const {
    ldmatrix_x4_trans(b, steps.at(k * 16, n));
  }
};

// Accumulators as operand A in registers: two neighbouring tiles of eight columns make one step of
// 16.
template <typename T, int ARCH, int M, int N>
struct RegisterOperandA {
  uint32_t fragment[M][N / 2][4];
  __device__ explicit RegisterOperandA(const float (&acc)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        fragment[m][n / 2][n % 2 * 2] = pack<T, ARCH>(acc[m][n][0], acc[m][n][1]);
        fragment[m][n / 2][n % 2 * 2 + 1] = pack<T, ARCH>(acc[m][n][2], acc[m][n][3]);
      }
    }
  }
  __device__ void load(uint32_t (&a)[4], int m, int k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = fragment[m][k][i];
  }
};

// acc += A * B over K_STEPS steps of 16.
template <typename T, int ARCH, int K_STEPS, class A, class B, int M, int N>
__device__ __forceinline__ void warp_gemm(float (&acc)[M][N][4], const A& a_operand,
                                          const B& b_operand) {
  static_assert(N % 2 == 0, "B comes 16 columns at a time");
#pragma unroll
  for (int k = 0; k < K_STEPS; ++k) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) a_operand.load(a[m], m, k);
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      uint32_t b[4];
      b_operand.load(b, n, k);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_m16n8k16<T, ARCH>(acc[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16<T, ARCH>(acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <int M, int N>
__device__ __forceinline__ void set_zero(float (&acc)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.f;
    }
  }
}
