// A projection of up to 16 rows, limited by reading the weights once: few.cuh. Blocks take tiles of
// 8 pairs of columns in turns; x is normalised in shared memory, if there is a norm.
#include "column_pairs.cuh"
#include "few.cuh"

template <typename T, Activation ACTIVATION, bool GATED, bool ROTARY, int ROWS, int VECTOR,
          int ARCH, int SMEM_BYTES>
__global__ void __launch_bounds__(FEW_THREADS, 1)
    linear_few(const __grid_constant__ LinearParams params) {
  using Tile = FewTile<T, ROWS, VECTOR, ARCH>;
  extern __shared__ __align__(128) char smem[];
  float* sums = reinterpret_cast<float*>(smem);
  const SmemRows x = {smem + Tile::X_OFFSET, int(params.rows), SmemRows::pitch_of<T>(params.depth)};

  auto weights = [&](int tile, int row) -> WeightRows<T> {
    const int pair = tile * TILE_PAIRS + row;
    return {weight_row<T, GATED, ROTARY>(params, pair, false),
            weight_row<T, GATED, ROTARY>(params, pair, true)};
  };
  auto stage = [&] {
    stage_rows<Tile>(x, static_cast<const T*>(params.x), params.x_stride, params.depth);
    __syncthreads();
    if (params.norm_weight) {
      normalise_rows<Tile>(x, params.depth, params.norm, params.norm_weight, params.norm_bias,
                           sums + Tile::SUMS);
      __syncthreads();
    }
  };
  auto finish = [&](int tile, int pair, int row, float first, float second) {
    const ColumnPair columns = column_pair<GATED, ROTARY>(params, tile * TILE_PAIRS + pair);
    const RowRotation<T> rotation(params, row);
    finish_pair<T, ACTIVATION, GATED, ROTARY>(params, row, rotation, columns, first, second);
    store_pair<T, GATED>(params, row, columns, first, second);
  };
  const int tiles = ceil_div(num_pairs(params, GATED), TILE_PAIRS);
  few_products<Tile>(x, sums, params.depth, blockIdx.x, tiles, gridDim.x, weights, stage, finish);
}
