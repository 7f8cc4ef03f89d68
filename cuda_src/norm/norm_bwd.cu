// The backward of LayerNorm and RMSNorm for rows that fit into the registers of a block; the
// algorithm is in norm_bwd_rows.cuh. When all blocks of this cooperative launch have written their
// partial sums of dweight and dbias, they add them up, in chunks of 32 columns that are dealt out
// to the blocks. The launch is cooperative, so all blocks run at once and the barrier of the grid
// is reached.
#include "../common/grid_barrier.cuh"
#include "norm_bwd_rows.cuh"
#include "sum_shares.cuh"

template <typename T, typename WEIGHT, bool RMS, int ROW_THREADS, int LOADS, int VECTOR,
          int NUM_THREADS, int STAGES>
__global__ void __launch_bounds__(NUM_THREADS, 1)
    norm_bwd(const __grid_constant__ NormBwdParams params) {
  extern __shared__ __align__(16) char smem[];
  using Tile = RowTile<ROW_THREADS, LOADS, VECTOR, NUM_THREADS>;
  norm_bwd_rows<Tile, T, WEIGHT, RMS, 1, STAGES>(params, smem);

  grid_barrier(params.counter);
  const int columns = params.shape.columns;
  const int chunks = (params.dbias ? 2 : 1) * ((columns + 31) / 32);
  const SumPartialsParams sum = {params.partials, params.dweight, params.dbias, gridDim.x, columns};
#pragma unroll 1
  for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    sum_shares<WEIGHT, NUM_THREADS / 32>(sum, chunk);
    __syncthreads();
  }
}
