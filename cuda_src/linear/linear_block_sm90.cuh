// The parts of a block of linear_sm90: its shared memory and barriers, the order in which it takes
// the tiles of out, and the loader, which is one lane.
#pragma once
#include "../common/ring.cuh"
#include "../common/smem_tile.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "params.cuh"

template <int BLOCK_M_, int BLOCK_N_, int STAGES_, bool PINGPONG_, int CLUSTER_, bool GATED_>
struct LinearLayout {
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int BLOCK_N = BLOCK_N_;  // rows of weights, with a gate of both
  static constexpr int STAGES = STAGES_;
  static constexpr bool PINGPONG = PINGPONG_;
  static constexpr int CLUSTER = CLUSTER_;
  static constexpr bool GATED = GATED_;
  static constexpr int BLOCK_K = 64;
  static constexpr int GROUPS = 2;  // consumer warpgroups
  static constexpr int GROUP_ROWS = PINGPONG ? BLOCK_M : BLOCK_M / GROUPS;
  static constexpr int OUT_COLUMNS = GATED ? BLOCK_N / 2 : BLOCK_N;
  static_assert(GROUP_ROWS % 64 == 0, "a wgmma has 64 rows");
  static_assert(OUT_COLUMNS % 64 == 0, "out is written in blocks of 64 columns");

  // A stage of the ring: x and weights for 64 of the depth, or as many blocks of 64 columns of the
  // residual as fit.
  using TileX = SmemTile<BLOCK_M, BLOCK_K>;
  using TileW = SmemTile<BLOCK_N, BLOCK_K>;
  using TileResidual = SmemTile<BLOCK_M, 64>;
  static constexpr int STAGE_BYTES = TileX::BYTES + TileW::BYTES;
  static constexpr int OUT_BLOCKS = OUT_COLUMNS / 64;
  static constexpr int STAGE_BLOCKS = STAGE_BYTES / TileResidual::BYTES;
  static constexpr int RESIDUAL_STEPS = ceil_div(OUT_BLOCKS, STAGE_BLOCKS);
  static_assert(RESIDUAL_STEPS < STAGES, "all are loaded while the last step of depth is held");

  // Each consumer warp has two buffers behind the ring, from which out is stored.
  using TileOut = SmemTile<16, 64>;
  static constexpr int OUT_OFFSET = STAGES * STAGE_BYTES;
  static constexpr int BYTES = OUT_OFFSET + GROUPS * 4 * 2 * TileOut::BYTES;

  // The number of stages that a tile fills, one after the other.
  __device__ static int depth_steps(const LinearParams& params) {
    return ceil_div(params.depth, BLOCK_K);
  }
  template <bool RESIDUAL>
  __device__ static int tile_steps(const LinearParams& params) {
    return depth_steps(params) + (RESIDUAL ? RESIDUAL_STEPS : 0);
  }
};

template <class L, typename T>
struct LinearShared {
  RingBarriers<L::STAGES> ring;
  // Each group has two buffers, as a warp may be a tile ahead of another.
  alignas(16) T bias[L::GROUPS][2][L::BLOCK_N];

  // A copy into a stage may go to all blocks of the cluster, so all of them must have released it.
  __device__ void init() {
    ring.init((L::PINGPONG ? 1 : L::GROUPS) * 4 * L::CLUSTER);
    mbarrier_init_fence();
  }
  __device__ void release(int stage) {
    if constexpr (L::CLUSTER == 1) {
      ring.release(stage);
    } else {
      const int lane = threadIdx.x % 32;
      if (lane < L::CLUSTER) mbarrier_arrive_cluster(smem_address(&ring.empty[stage]), lane);
    }
  }
};

// The first row and column of a block's tile in out.
struct LinearTile {
  int row;
  int column;
};

// The order of the tiles. The blocks of a cluster have tiles below each other, with the same
// weights. The tiles that all clusters have at the same time should together be about as high as
// wide, because then they read least: so tiles are taken in bands of GROUP_TILES rows of tiles.
template <class L>
struct LinearTiles {
  static constexpr uint32_t GROUP_TILES = 8;
  static constexpr uint32_t ROWS = L::CLUSTER * L::BLOCK_M;
  uint32_t rows;
  uint32_t columns;

  __device__ explicit LinearTiles(const LinearParams& params)
      : rows((uint32_t(params.rows) + ROWS - 1) / ROWS),
        columns(ceil_div(params.columns, L::OUT_COLUMNS)) {}

  __device__ uint32_t size() const { return rows * columns; }
  __device__ static uint32_t first() { return blockIdx.x / L::CLUSTER; }
  __device__ static uint32_t stride() { return gridDim.x / L::CLUSTER; }

  __device__ LinearTile at(uint32_t index, uint32_t rank) const {
    const uint32_t band = index / (GROUP_TILES * columns) * GROUP_TILES;
    const uint32_t rest = index % (GROUP_TILES * columns);
    const uint32_t height = min(GROUP_TILES, rows - band);
    return {int((band + rest % height) * ROWS + rank * L::BLOCK_M),
            int(rest / height * L::OUT_COLUMNS)};
  }
};

// Loads all tiles of this block. In a cluster each of the two blocks loads half of the weights, for
// both.
template <bool RESIDUAL, class L, typename T>
__device__ __forceinline__ void load_linear_tiles(const LinearSm90Params& params,
                                                  LinearShared<L, T>& shared, uint32_t smem,
                                                  uint32_t rank) {
  constexpr int HALF = L::BLOCK_N / 2;
  constexpr int HALF_BYTES = L::TileW::BYTES / 2;
  const LinearTiles<L> tiles(params.base);
  const int depth_steps = L::depth_steps(params.base);
  Ring<L::STAGES> ring;
#pragma unroll 1
  for (uint32_t index = tiles.first(); index < tiles.size(); index += tiles.stride()) {
    const LinearTile tile = tiles.at(index, rank);
#pragma unroll 1
    for (int step = 0; step < depth_steps; ++step, ring.advance()) {
      const uint32_t x = smem + ring.stage * L::STAGE_BYTES;
      const uint32_t weight = x + L::TileX::BYTES;
      const uint32_t full = smem_address(&shared.ring.full[ring.stage]);
      const int k = step * L::BLOCK_K;
      shared.ring.wait_empty(ring);
      mbarrier_arrive_expect(full, L::STAGE_BYTES);
      tma_load(x, params.x_map, full, k, tile.row, 0, 0);
      if constexpr (L::CLUSTER == 2) {
        const TensorMap& map = L::GATED && rank ? params.gate_weight_map : params.weight_map;
        const int row = tile.column + (L::GATED ? 0 : rank * HALF);
        tma_load_multicast(weight + rank * HALF_BYTES, map, full, 0b11, k, row, 0, 0);
      } else if constexpr (L::GATED) {
        tma_load(weight, params.weight_map, full, k, tile.column, 0, 0);
        tma_load(weight + HALF_BYTES, params.gate_weight_map, full, k, tile.column, 0, 0);
      } else {
        tma_load(weight, params.weight_map, full, k, tile.column, 0, 0);
      }
    }
    if constexpr (RESIDUAL) {
#pragma unroll 1
      for (int block = 0; block < L::OUT_BLOCKS; block += L::STAGE_BLOCKS, ring.advance()) {
        const int blocks = min(L::STAGE_BLOCKS, L::OUT_BLOCKS - block);
        const uint32_t full = smem_address(&shared.ring.full[ring.stage]);
        shared.ring.wait_empty(ring);
        mbarrier_arrive_expect(full, blocks * L::TileResidual::BYTES);
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
          tma_load(smem + ring.stage * L::STAGE_BYTES + i * L::TileResidual::BYTES,
                   params.residual_map, full, tile.column + (block + i) * 64, tile.row, 0, 0);
        }
      }
    }
  }
}
