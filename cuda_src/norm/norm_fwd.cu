// The forward of LayerNorm and RMSNorm for rows that fit into the registers of one block; the
// algorithm is in norm_fwd_rows.cuh. A row of up to a warp's threads shares its block with others.
#include "norm_fwd_rows.cuh"

template <typename T, typename WEIGHT, bool RMS, int ROW_THREADS, int LOADS, int VECTOR, int BLOCKS>
__global__ void __launch_bounds__(block_threads(ROW_THREADS), BLOCKS)
    norm_fwd(const __grid_constant__ NormFwdParams params) {
  constexpr bool EARLY = ROW_THREADS <= 32 && LOADS <= 3 && sizeof(WEIGHT) == 2;
  norm_fwd_rows<RowTile<ROW_THREADS, LOADS, VECTOR>, 1, EARLY, RMS, T, WEIGHT>(params);
}
