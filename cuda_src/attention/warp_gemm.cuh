// Matrix products of one warp on mma.sync m16n8k16, operands from SmemTile through ldmatrix.
//
// An operand is named by how it lies in shared memory: a row operand has the summation index k
// along the rows of the tile (contiguous), a column operand has k running down the rows. ldmatrix
// reads both, the second with .trans.
#pragma once
#include "../common/smem_tile.cuh"
#include "../ptx/mma.cuh"

// Addresses of the 16-column steps of a warp's part [col, col + WIDTH) of a tile, for this lane.
// One register when a step is an XOR away from the first, one a step otherwise.
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

// A[16 M rows at row][k]: rows of the product along the rows of the tile.
template <class Tile>
struct RowOperandA {
  uint32_t address;
  __device__ RowOperandA(uint32_t smem, int row)
      : address(smem + Tile::offset(row + threadIdx.x % 16, threadIdx.x % 32 / 16)) {}
  __device__ void load(uint32_t (&a)[4], int m, int k) const {
    ldmatrix_x4(a, Tile::advance(address, m * 16, k * 2));
  }
};

// A[k][WIDTH columns at col]: rows of the product along the columns of the tile.
template <class Tile, int WIDTH>
struct ColumnOperandA {
  ColumnSteps<Tile, WIDTH> steps;
  __device__ ColumnOperandA(uint32_t smem, int col)
      : steps(smem, threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8, col / 8 + threadIdx.x / 8 % 2) {}
  __device__ void load(uint32_t (&a)[4], int m, int k) const {
    ldmatrix_x4_trans(a, steps.at(k * 16, m));
  }
};

// B[n][k], 16 n a load: registers 0, 1 serve columns 0..7 of the product, 2, 3 columns 8..15.
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

// B[k][WIDTH columns at col].
template <class Tile, int WIDTH>
struct ColumnOperandB {
  ColumnSteps<Tile, WIDTH> steps;
  __device__ ColumnOperandB(uint32_t smem, int col)
      : steps(smem, threadIdx.x % 16, col / 8 + threadIdx.x % 32 / 16) {}
  __device__ void load(uint32_t (&b)[4], int n, int k) const {
    ldmatrix_x4_trans(b, steps.at(k * 16, n));
  }
};

// Accumulators as an A operand in registers: two neighbouring 8-column tiles make one k16 step.
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
