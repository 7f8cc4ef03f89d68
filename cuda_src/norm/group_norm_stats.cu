// Mean and deviations of groups that do not fit into the registers of a block: `splits` blocks
// share a group, and group_norm_apply merges what they found.
#include "group_tile.cuh"

constexpr int THREADS = 256;
constexpr int LOADS = 4;

template <typename T, int VECTOR>
__global__ void __launch_bounds__(THREADS, min_blocks(THREADS, 64))
    group_norm_stats(const __grid_constant__ GroupNormFwdParams params) {
  using Tile = RowTile<THREADS, LOADS, VECTOR>;
  const GroupNormShape& shape = params.shape;
  const int split = blockIdx.x % shape.splits;
  const int64_t group = blockIdx.x / shape.splits;  // of all samples
  const T* x = static_cast<const T*>(params.x) + group / shape.groups * params.x_strides.batch +
               group % shape.groups * params.x_strides.group;
  const int size = group_size(shape);
  Moments moments = {0.f, 0.f, 0.f};
  for (int64_t begin = int64_t(split) * Tile::COLUMNS; begin < size;
       begin += int64_t(shape.splits) * Tile::COLUMNS) {
    const int rest = size - int(begin);
    RowPacks<Tile, T> values;
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
      const int element = Tile::column(load);
      if (element >= rest) continue;
      values.packs[load] =
          load_pack<VECTOR>(x + offset(params.x_strides, position_of(int(begin) + element, shape)));
    }
    moments = moments + values.moments(rest);
  }
  __shared__ Moments scratch[MAX_WARPS];
  moments = group_sum<THREADS>(moments, scratch);
  if (threadIdx.x == 0) reinterpret_cast<Moments*>(params.partials)[blockIdx.x] = moments;
}
