// out = epilogue(norm(x) weight^T) for up to 32 rows of x, limited by reading the weights once
// (small_m.cuh): on tensor cores by mma.sync, or without. A block has a share of the pairs of
// columns of out, so no block waits for another. If there is a norm, every block normalises x in
// its shared memory.
#include "../ptx/dependent_launch.cuh"
#include "column_pairs.cuh"
#include "small_m.cuh"

// Brings what the epilogue of a block reads, which is far away, closer while weights are on their
// way.
template <typename T, bool GATED, bool ROTARY>
__device__ __forceinline__ void prefetch_epilogue(const LinearParams& params, const Share& pairs) {
  for (int i = threadIdx.x; i < pairs.size() * int(params.rows); i += SMALL_M_THREADS) {
    const int row = i / pairs.size();
    const int column = column_pair<GATED, ROTARY>(params, pairs.begin + i % pairs.size()).first;
    if (params.bias) prefetch_l2(static_cast<const T*>(params.bias) + column);
    if (GATED && params.gate_bias) prefetch_l2(static_cast<const T*>(params.gate_bias) + column);
    if (params.residual)
      prefetch_l2(static_cast<const T*>(params.residual) + row * params.residual_stride + column);
    if (ROTARY && is_rotated(params.rotary, column))
      RowRotation<T>(params, row).prefetch(rotary_pair(params.rotary, column));
  }
}

// The weights of a block, as Slices want them.
template <class Tile, bool GATED, bool ROTARY>
struct ColumnWeights {
  const LinearParams& params;
  int begin;  // first pair of the block
  EvenTiles tiles;
  Walk walk;

  __device__ const typename Tile::T* row(int tile, int row, bool second) const {
    const int pair = tiles.pair(tile, row);
    if (pair < 0) return nullptr;
    return weight_row<typename Tile::T, GATED, ROTARY>(params, begin + pair, second);
  }
};

template <typename T, Activation ACTIVATION, bool GATED, bool ROTARY, int ROWS, int VECTOR,
          int NUM_STAGES, int ARCH, int SMEM_BYTES>
__global__ void __launch_bounds__(SMALL_M_THREADS, 1)
    linear_small_m(const __grid_constant__ LinearParams params) {
  using Tile = SmallMTile<T, ROWS, VECTOR, NUM_STAGES, ARCH>;
  using Weights = ColumnWeights<Tile, GATED, ROTARY>;
  extern __shared__ __align__(128) char smem[];
  float* sums = reinterpret_cast<float*>(smem + Tile::SUMS_OFFSET);
  const SmemRows x = {smem + Tile::X_OFFSET, int(params.rows), SmemRows::pitch_of<T>(params.depth)};
  const Share pairs(num_pairs(params, GATED), blockIdx.x, gridDim.x);
  const EvenTiles tiles(pairs.size());

  // ---- weights and x on their way ----
  wait_for_previous_kernel();
  launch_next_kernel();
  SliceRing<Tile> ring(smem);
  Slices<Tile, Weights> slices(
      Weights{params, pairs.begin, tiles, shared_walk<Tile>(tiles, params.depth)},
      RowCopy<Tile>{x, static_cast<const T*>(params.x), params.x_stride, params.depth},
      params.norm_weight == nullptr);
  ask_for_rows<Tile>(ring, slices, params);
  prefetch_epilogue<T, GATED, ROTARY>(params, pairs);
  wait_for_rows<Tile>(x, params, sums + Tile::SUMS);

  // ---- products ----
  small_m_products<Tile>(
      ring, slices, x, tiles, params.depth, sums,
      [&](int pair, int row, float first, float second) {
        const ColumnPair columns = column_pair<GATED, ROTARY>(params, pairs.begin + pair);
        const RowRotation<T> rotation(params, row);
        finish_pair<T, ACTIVATION, GATED, ROTARY>(params, row, rotation, columns, first, second);
        store_pair<T, GATED>(params, row, columns, first, second);
      });
}
