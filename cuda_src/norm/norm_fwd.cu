// norm_fwd_rows.cuh, where a block has whole rows.
#include "norm_fwd_rows.cuh"

template <typename T, typename WEIGHT, bool RMS, int ROW_THREADS, int LOADS, int VECTOR, int BLOCKS>
__global__ void __launch_bounds__(block_threads(ROW_THREADS), BLOCKS)
    norm_fwd(const __grid_constant__ NormFwdParams params) {
  constexpr bool EARLY = ROW_THREADS <= 32 && LOADS <= 3 && sizeof(WEIGHT) == 2;
  norm_fwd_rows<RowTile<ROW_THREADS, LOADS, VECTOR>, 1, EARLY, RMS, T, WEIGHT>(params);
}
