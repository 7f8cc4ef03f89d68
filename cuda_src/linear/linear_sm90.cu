// A projection of many rows on wgmma and TMA (Hopper), for float16 and bfloat16:
//
//   out = epilogue(x weight^T)    LinearParams has the arrays, epilogue.cuh what follows the
//   product
//
// A persistent block takes tiles of BLOCK_M rows and BLOCK_N columns of out, one after the other,
// and keeps the sums of a tile in registers. With a gate, half of the BLOCK_N columns of sums are
// those of gate_weight, so that both sums of a column are in the same thread.
//
// Template parameters. HEAD_DIM is 0 without a rotary embedding. STAGES is the number of buffers of
// the ring, SMEM_BYTES the dynamic shared memory of the launch.
//
// Warps.
//   warpgroup 0  the producer: one lane loads x and weights, 64 of the depth a step, and then the
//                residual (linear_block_sm90.cuh)
//   others       two warpgroups of consumers, which multiply, compute the epilogue and store
//
// The consumers share the work in one of two ways:
//   PINGPONG     each has tiles of its own, and they multiply one after the other: one while the
//                other is in its epilogue. Only one of two tiles needs the tensor cores at a time,
//                so that a short depth or a costly activation does not leave them idle.
//   otherwise    each has half of the rows of the same tile, which may then be twice as large: less
//                is read from the L2 cache, which is what limits a long depth.
//
// The blocks of a cluster of two have tiles below each other. Each loads half of the weights and
// sends them to both by multicast.
//
// Shared memory holds STAGES buffers of a step of x and weights, in which blocks of 64 columns of
// the residual lie as well, then two buffers of 16 rows and 64 columns for each consumer warp, from
// which TMA stores out. Each warpgroup has two buffers for the bias of a tile.
//
// Why nothing is overwritten too early. A stage of the ring is filled after all of its consumers
// have released it, in both blocks of a cluster, and read after the copy has completed. A warp
// writes an out buffer after TMA has read what it stored from there two stores before. All warps
// of a warpgroup meet once a tile, after the bias is there; so when one loads the bias of a tile,
// all are done with the tile two before, which had the same buffer.
//
// Why it ends. The producer and the consumers walk over the same tiles in the same order, and each
// tile takes the same number of steps of the ring. With PINGPONG the tiles alternate between the
// warpgroups; each lets the other one multiply once a tile, before its own next tile, and the first
// warpgroup lets itself begin.
//
// Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "Tensor copy"; CUTLASS,
// "Efficient GEMM in CUDA: warp specialization" for the two ways of sharing.
#include "../common/convert.cuh"
#include "../common/pack.cuh"
#include "../common/wg_gemm.cuh"
#include "epilogue.cuh"
#include "linear_block_sm90.cuh"

// Loads the bias of a tile into shared memory, eight columns a thread; zeros where there is none.
template <class L, typename T>
__device__ __forceinline__ void load_bias(T* smem, const LinearParams& params, int tile_column) {
  const int first = threadIdx.x % WARPGROUP * 8;
  if (first < L::BLOCK_N) {
    const bool of_gate = first >= L::OUT_COLUMNS;
    const T* bias = static_cast<const T*>(of_gate ? params.gate_bias : params.bias);
    const int column = tile_column + first % L::OUT_COLUMNS;
    cp_async_16(smem_address(smem + first), bias + column, bias && column < params.columns);
  }
  cp_async_commit();
}

// Reads the bias of this thread's two columns in each of N blocks of eight columns.
template <typename T, int N>
__device__ __forceinline__ void read_bias(Pack<T, 2> (&bias)[N], const T* smem) {
#pragma unroll
  for (int n = 0; n < N; ++n) bias[n] = load_pack<2>(smem + n * 8 + threadIdx.x % 4 * 2);
}

// Adds the bias and rotates the heads of a tile; `row` is the first row of this thread. A head
// begins where the tile does, so that both numbers of a pair are in the same thread.
template <int HEAD_DIM, int ROTARY_DIM, bool INTERLEAVED, typename T, int M, int N>
__device__ __forceinline__ void rotate_heads(float (&acc)[M][N][4], const T* smem_bias,
                                             const LinearParams& params, int row, int tile_column) {
  constexpr int PAIRS = INTERLEAVED ? 4 : 8;   // of one block of eight columns, or of two
  constexpr int PARTNER = ROTARY_DIM / 2 / 8;  // blocks of eight between a pair
  static_assert(HEAD_DIM % 8 == 0 && ROTARY_DIM <= HEAD_DIM && ROTARY_DIM % (2 * PAIRS) == 0,
                "blocks of eight columns are of one head, and rotated as a whole");
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    Pack<T, 2> bias[1];
    read_bias(bias, smem_bias + n * 8);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] += to_float(bias[0].values[i % 2]);
    }
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t last = params.rows - 1;
      const RowRotation<T> rotate(params, min(int64_t(row + m * 64 + half * 8), last));
#pragma unroll
      for (int j = 0; j < ROTARY_DIM / 2 / PAIRS; ++j) {
#pragma unroll
        for (int n = j; n < N; n += HEAD_DIM / 8) {
          if (tile_column + n * 8 >= params.rotary.columns) continue;
          float (&first)[4] = acc[m][n];
          if constexpr (INTERLEAVED) {
            rotate(j * 4 + lane, first[2 * half], first[2 * half + 1]);
          } else {
            float (&second)[4] = acc[m][n + PARTNER];
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
              rotate(j * 8 + lane * 2 + i % 2, first[i], second[i]);
            }
          }
        }
      }
    }
  }
}

// Adds a fragment of the residual, which lies in shared memory.
template <typename T>
__device__ __forceinline__ void add_residual(float (&values)[2][4], uint32_t smem) {
  uint32_t words[4];
  ldmatrix_x4(words, smem);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Pack<T, 2> pair = __builtin_bit_cast(Pack<T, 2>, words[i]);
    values[i / 2][i % 2 * 2] += to_float(pair.values[0]);
    values[i / 2][i % 2 * 2 + 1] += to_float(pair.values[1]);
  }
}

template <typename T, Activation ACTIVATION, bool GATED, bool RESIDUAL, int HEAD_DIM,
          int ROTARY_DIM, bool INTERLEAVED, int BLOCK_M, int BLOCK_N, int STAGES, bool PINGPONG,
          int CLUSTER, int SMEM_BYTES>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(3 * WARPGROUP, 1)
    linear_sm90(const __grid_constant__ LinearSm90Params params) {
  using Layout = LinearLayout<BLOCK_M, BLOCK_N, STAGES, PINGPONG, CLUSTER, GATED>;
  using TileX = typename Layout::TileX;
  using TileOut = typename Layout::TileOut;
  static_assert(Layout::BYTES == SMEM_BYTES, "host and device disagree on shared memory");
  static_assert(CLUSTER == 1 || CLUSTER == 2, "weights are halved between two blocks");
  static_assert(HEAD_DIM == 0 || (ACTIVATION == none && !GATED && BLOCK_N % HEAD_DIM == 0),
                "heads are whole, and rotated right after the bias");

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t smem_ring = smem_address(smem);
  __shared__ LinearShared<Layout, T> shared;
  const uint32_t rank = CLUSTER == 1 ? 0 : cluster_rank();
  if (threadIdx.x == 0) shared.init();
  if constexpr (CLUSTER == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }

  if (warpgroup_index() == 0) {
    dealloc_registers<24>();
    if (warp_in_warpgroup() == 0 && elect_one()) {
      load_linear_tiles<RESIDUAL>(params, shared, smem_ring, rank);
    }
    return;
  }

  // ---- consumers ----
  alloc_registers<240>();
  const LinearTiles<Layout> tiles(params.base);
  const int depth_steps = Layout::depth_steps(params.base);
  const int tile_steps = Layout::template tile_steps<RESIDUAL>(params.base);
  const int group = warpgroup_index() - 1;
  const int lane = threadIdx.x % 32;
  const int group_row = PINGPONG ? 0 : group * Layout::GROUP_ROWS;
  const int warp_row = group_row + warp_in_warpgroup() * 16;
  const uint32_t smem_out =
      smem_ring + Layout::OUT_OFFSET + (group * 4 + warp_in_warpgroup()) * 2 * TileOut::BYTES;
  int out_buffer = 0;
  int bias_buffer = 0;
  Ring<STAGES> ring;

  constexpr int ATOMS = Layout::GROUP_ROWS / 64;  // 64 rows each
  float acc[ATOMS][BLOCK_N / 8][4];

  const auto begin_products = [&] {
    if constexpr (PINGPONG) named_barrier_sync(1 + group, 2 * WARPGROUP);
  };
  const auto end_products = [&] {
    if constexpr (PINGPONG) named_barrier_arrive(1 + (group ^ 1), 2 * WARPGROUP);
  };
  const auto issue = [&](bool add) {
    shared.ring.wait_full(ring);
    const uint32_t x = smem_ring + uniform(ring.stage) * Layout::STAGE_BYTES;
    const WgRowOperand<typename Layout::TileW> weight(x + TileX::BYTES, 0);
#pragma unroll
    for (int m = 0; m < ATOMS; ++m) {
      wg_gemm<T, Layout::BLOCK_K / 16>(acc[m], WgRowOperand<TileX>(x, group_row + m * 64), weight,
                                       add);
    }
  };
  // Computes the epilogue of 16 rows and a block of 64 columns, whose residual is at smem_residual.
  // The warp stores them from one of its two buffers.
  const auto write_out = [&](const float (&sums)[BLOCK_N / 8][4], int block, uint32_t smem_residual,
                             int row, int column) {
    const T* smem_bias = shared.bias[group][bias_buffer] + block * 64;
    Pack<T, 2> bias[8], gate_bias[8];
    read_bias(bias, smem_bias);
    if constexpr (GATED) read_bias(gate_bias, smem_bias + Layout::OUT_COLUMNS);
    const uint32_t buffer = smem_out + out_buffer * TileOut::BYTES;
    bulk_wait_read<1>();
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t place = TileOut::offset(lane % 16, 2 * k + lane / 16);
      float values[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int n = 2 * k + i / 4;
        const auto biased = [&](int first, const Pack<T, 2>(&bias)[8]) {
          return sums[first + n][i % 4] + to_float(bias[n].values[i % 2]);
        };
        float& value = values[i / 4][i % 4];
        if constexpr (HEAD_DIM != 0) {
          value = sums[block * 8 + n][i % 4];  // rotate_heads has added the bias
        } else if constexpr (GATED) {
          value = activate<ACTIVATION>(biased(BLOCK_N / 16 + block * 8, gate_bias)) *
                  biased(block * 8, bias);
        } else {
          value = activate<ACTIVATION>(biased(block * 8, bias));
        }
      }
      if constexpr (RESIDUAL) add_residual<T>(values, smem_residual + place);
      uint32_t packed[1][4];
      wg_pack<T>(packed, values);
      stmatrix_x4(buffer + place, packed[0]);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      tma_store(params.out_map, buffer, column, row, 0, 0);
      bulk_commit();
    }
    out_buffer ^= 1;
  };
  const auto epilogue = [&](const LinearTile& tile) {
    if constexpr (HEAD_DIM != 0) {
      rotate_heads<HEAD_DIM, ROTARY_DIM, INTERLEAVED>(acc, shared.bias[group][bias_buffer],
                                                      params.base, tile.row + warp_row + lane / 4,
                                                      tile.column);
    }
#pragma unroll
    for (int block = 0; block < Layout::OUT_BLOCKS; ++block) {
      using Tile = typename Layout::TileResidual;
      const int place = block % Layout::STAGE_BLOCKS;
      if (RESIDUAL && place == 0) shared.ring.wait_full(ring);
      const uint32_t smem_residual =
          smem_ring + ring.stage * Layout::STAGE_BYTES + place * Tile::BYTES;
#pragma unroll
      for (int m = 0; m < ATOMS; ++m) {
        const int row = warp_row + m * 64;
        write_out(acc[m], block, smem_residual + row * Tile::ROW_BYTES, tile.row + row,
                  tile.column + block * 64);
      }
      if (RESIDUAL && (place == Layout::STAGE_BLOCKS - 1 || block == Layout::OUT_BLOCKS - 1)) {
        shared.release(ring.stage);  // the warp has met in write_out since it read the stage
        ring.advance();
      }
    }
  };

  uint32_t index = tiles.first();
  uint32_t stride = tiles.stride();
  if constexpr (PINGPONG) {
    index += group * stride;
    stride *= 2;
    if (group == 0) {
      named_barrier_arrive(1, 2 * WARPGROUP);  // lets itself begin
    } else {
      ring.advance(tile_steps);
    }
  }
#pragma unroll 1
  for (; index < tiles.size(); index += stride) {
    // ---- the product: a step is issued before the one before it is waited for ----
    begin_products();
    issue(false);
    const LinearTile tile = tiles.at(index, rank);
    load_bias<Layout>(shared.bias[group][bias_buffer], params.base, tile.column);
#pragma unroll 1
    for (int step = 1; step < depth_steps; ++step) {
      const int stage_before = ring.stage;
      ring.advance();
      issue(true);
      wgmma_wait<ATOMS>();
      shared.release(stage_before);
    }
    if constexpr (PINGPONG && RESIDUAL) {
      // A barrier tells the fills of a stage apart by one bit. While a stage is being filled for
      // this group, the other one, which waits for the next fill, would take the one before this
      // for it. So all fills of this tile must have completed before the other group waits.
      Ring<STAGES> residual = ring;
#pragma unroll
      for (int i = 0; i < Layout::RESIDUAL_STEPS; ++i) {
        residual.advance();
        shared.ring.wait_full(residual);
      }
    }
    end_products();
    cp_async_wait<0>();
    named_barrier_sync(3 + group, WARPGROUP);  // all threads see the bias
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < ATOMS; ++m) pin(acc[m]);
    shared.release(ring.stage);
    ring.advance();

    epilogue(tile);
    bias_buffer ^= 1;
    if constexpr (PINGPONG) ring.advance(tile_steps);  // the other warpgroup has these
  }
  bulk_wait<0>();
  // The other block of the cluster may still arrive at barriers of this one.
  if constexpr (CLUSTER != 1) cluster_sync();
}
