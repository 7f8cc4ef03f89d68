// A projection of any number of rows on mma.sync (Turing: float16 only):
//
//   out = epilogue(x weight^T)    LinearParams has the arrays, epilogue.cuh what follows the
//   product
//
// A block computes 128 rows x 64 pairs of columns (column_pairs.cuh) of out. Its 128 rows of
// weights are those of the first columns of the pairs, then those of the second. It has 8 warps,
// 2 x 4, with 64 rows x 16 pairs each, so that both columns of a pair are in the same thread.
//
// Shared memory holds NUM_STAGES stages, each with a tile of x and one of weights for 32 of the
// depth. While one stage is multiplied, the copies into those that follow are on their way.
//
// Why nothing is overwritten too early. The block meets once a step. All warps reach that barrier
// after their reads of the stage of the step before, which is the one that is filled next. A thread
// waits for its own copies in front of the barrier, so the stage is complete behind it.
#include "../attention/warp_gemm.cuh"
#include "column_pairs.cuh"

constexpr int THREADS = 256;
constexpr int BLOCK = 128;
constexpr int PAIRS = BLOCK / 2;
constexpr int BLOCK_K = 32;
constexpr int WARP_ROWS = 64;
constexpr int WARP_PAIRS = 16;

using Tile = SmemTile<BLOCK, BLOCK_K>;
constexpr int STAGE_BYTES = 2 * Tile::BYTES;
constexpr int COPIES = BLOCK * Tile::ROW_CHUNKS / THREADS;  // of a thread, for x and for weights

// The B operand: 16 rows of weights for the first columns of a warp's pairs (n = 0), and 16 for the
// second columns (n = 1).
struct PairOperandB {
  uint32_t address;
  __device__ PairOperandB(uint32_t smem, int row)
      : address(smem + Tile::offset(row + threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8,
                                    threadIdx.x / 8 % 2)) {}
  __device__ void load(uint32_t (&b)[4], int n, int k) const {
    ldmatrix_x4(b, Tile::advance(address, n * PAIRS, k * 2));
  }
};

// Copies 8 elements of a row, from k on, to shared memory; those from `depth` on are zeros.
template <int VECTOR, int ARCH, typename T>
__device__ __forceinline__ void copy_chunk(uint32_t to, const T* row, int k, int depth,
                                           bool valid) {
  valid = valid && k < depth;
  if constexpr (VECTOR > 1 && ARCH >= 80) {
    cp_async_16(to, valid ? row + k : row, valid);
  } else if constexpr (VECTOR > 1) {
    copy_16(to, row + k, valid);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      uint32_t low = 0, high = 0;
      if (valid) low = row[k + i < depth ? k + i : k].bits;
      if (valid) high = row[k + i + 1 < depth ? k + i + 1 : k].bits;
      low = k + i < depth ? low : 0, high = k + i + 1 < depth ? high : 0;
      st_shared_32(to + 2 * i, low | high << 16);
    }
  }
}

template <typename T, Activation ACTIVATION, bool GATED, bool ROTARY, int VECTOR, int NUM_STAGES,
          int ARCH, int SMEM_BYTES>
__global__ void __launch_bounds__(THREADS, ARCH >= 80 && VECTOR > 1 ? 2 : 1)
    linear_mma(const __grid_constant__ LinearParams params) {
  static_assert(SMEM_BYTES == NUM_STAGES * STAGE_BYTES, "host and device disagree");
  extern __shared__ __align__(128) char smem_data[];
  const uint32_t smem = smem_address(smem_data);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // ---- which tile: blocks that follow each other have the same weights ----
  const int64_t row_blocks = (params.rows + BLOCK - 1) / BLOCK;
  const int64_t first_row = int64_t(blockIdx.x) % row_blocks * BLOCK;
  const int first_pair = int(blockIdx.x / row_blocks) * PAIRS;

  // ---- the copies of a thread: one chunk of COPIES rows of x, and of weights ----
  const int chunk = threadIdx.x % Tile::ROW_CHUNKS;
  const int copy_row = threadIdx.x / Tile::ROW_CHUNKS;
  constexpr int COPY_ROWS = THREADS / Tile::ROW_CHUNKS;
  const T* x_rows[COPIES];
  const T* weight_rows[COPIES];
  bool x_valid[COPIES];
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const int row = copy_row + i * COPY_ROWS;
    x_valid[i] = first_row + row < params.rows;
    x_rows[i] = static_cast<const T*>(params.x) +
                (x_valid[i] ? first_row + row : first_row) * params.x_stride;
    weight_rows[i] = weight_row<T, GATED, ROTARY>(params, first_pair + row % PAIRS, row >= PAIRS);
  }
  const auto copy_stage = [&](int stage, int k) {
    const uint32_t to = smem + stage * STAGE_BYTES;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const uint32_t offset = Tile::offset(copy_row + i * COPY_ROWS, chunk);
      copy_chunk<VECTOR, ARCH>(to + offset, x_rows[i], k + chunk * 8, params.depth, x_valid[i]);
      copy_chunk<VECTOR, ARCH>(to + Tile::BYTES + offset, weight_rows[i], k + chunk * 8,
                               params.depth, true);
    }
  };

  // ---- products ----
  const int warp_row = warp / 4 * WARP_ROWS, warp_pair = warp % 4 * WARP_PAIRS;
  float acc[WARP_ROWS / 16][WARP_PAIRS / 4][4];
  set_zero(acc);
  const int steps = ceil_div(params.depth, BLOCK_K);
#pragma unroll
  for (int stage = 0; stage < NUM_STAGES - 1; ++stage) {
    if (stage < steps) copy_stage(stage, stage * BLOCK_K);
    copies_commit<ARCH>();
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if constexpr (ARCH >= 80) cp_async_wait<NUM_STAGES - 2>();
    __syncthreads();  // the stage is complete, and all are done with the one before
    const int next = step + NUM_STAGES - 1;
    if (next < steps) copy_stage(next % NUM_STAGES, next * BLOCK_K);
    copies_commit<ARCH>();
    const uint32_t stage = smem + step % NUM_STAGES * STAGE_BYTES;
    warp_gemm<T, ARCH, BLOCK_K / 16>(acc, RowOperandA<Tile>(stage, warp_row),
                                     PairOperandB(stage + Tile::BYTES, warp_pair));
  }

  // ---- out: first columns are in acc[m][0], acc[m][1], second ones in acc[m][2], acc[m][3] ----
#pragma unroll
  for (int m = 0; m < WARP_ROWS / 16; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = first_row + warp_row + m * 16 + half * 8 + lane / 4;
      if (row >= params.rows) continue;
      const RowRotation<T> rotation(params, row);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const int pair = first_pair + warp_pair + n * 8 + lane % 4 * 2 + i % 2;
          const ColumnPair columns = column_pair<GATED, ROTARY>(params, pair);
          finish_pair<T, ACTIVATION, GATED, ROTARY>(params, row, rotation, columns, acc[m][n][i],
                                                    acc[m][n + 2][i]);
          store_pair<T, GATED>(params, row, columns, acc[m][n][i], acc[m][n + 2][i]);
        }
      }
    }
  }
}
