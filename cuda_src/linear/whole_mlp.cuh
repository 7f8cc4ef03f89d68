// A whole MLP of up to 32 rows in one cooperative launch; every weight is read once, and the hidden
// activations are in shared memory only.
//
// A cluster of CLUSTER blocks has a share of the hidden columns. Its blocks compute them
// (small_m.cuh) and give them to each other; then each multiplies all of them with the columns of
// the down projection that belong to them, for its part of out: longer runs of its weights, and
// fewer sums, than if every block were on its own. The first of those weights are asked for before
// the hidden columns are ready. These products are shares of out. They go to global memory; when
// those of all clusters are there, each block adds up a part of out, always in the same order.
//
// All 8 warps of a block have the same role. Shared memory is that of small_m.cuh, with the hidden
// columns of the cluster behind x. The kernel ends, as all blocks are on the GPU at once and each
// arrives at the same barriers: those of its cluster, then one of the grid. Hidden columns are
// written once, after all blocks of the cluster have begun and before they are read by any.
#pragma once
#include "../common/grid_barrier.cuh"
#include "../ptx/cluster.cuh"
#include "small_m.cuh"

constexpr int HIDDEN_UNIT = 16;  // hidden columns: 32 bytes of a weight, which are read as one

// Columns p and p + half of a share are a pair.
struct ColumnHalves {
  Share columns;
  int half;

  __device__ ColumnHalves(const Share& columns)
      : columns(columns), half(ceil_div(columns.size(), 2)) {}
  // -1 if there is none.
  __device__ int column(int pair, bool second) const {
    const int column = columns.begin + pair + (second ? half : 0);
    return pair < 0 || column >= columns.end ? -1 : column;
  }
};

// Rows of weights that belong to columns, in pairs.
template <class Tile>
struct RowPairs {
  using T = typename Tile::T;
  const T* first;  // of the first pair
  const T* second;
  int64_t first_stride;
  int64_t second_stride;
  int seconds;  // pairs that have a second row
  EvenTiles tiles;
  Walk walk;

  __device__ const T* row(int tile, int row, bool is_second) const {
    const int pair = tiles.pair(tile, row);
    if (pair < 0 || (is_second && pair >= seconds)) return nullptr;
    return is_second ? second + pair * second_stride : first + pair * first_stride;
  }
};

// All weights of a warp, as Slices want them: for hidden columns, then for out.
template <class Tile>
struct MlpWeights : RowPairs<Tile> {
  RowPairs<Tile> down;
  bool more = true;

  __device__ MlpWeights(const RowPairs<Tile>& up, const RowPairs<Tile>& down)
      : RowPairs<Tile>(up), down(down) {}
  __device__ bool next() {
    const bool found = more;
    static_cast<RowPairs<Tile>&>(*this) = down;
    more = false;
    return found;
  }
};

// Rows of x times the hidden columns of this block, to `hidden` of all blocks of the cluster, whose
// first column is `origin`.
template <class Tile, Activation ACTIVATION, bool GATED, int CLUSTER>
struct StoreHidden {
  using T = typename Tile::T;
  const MlpParams& params;
  const SmemRows& hidden;
  const ColumnHalves& halves;
  int origin;

  __device__ void operator()(int pair, int row, float first, float second) const {
    if constexpr (GATED) {
      store(halves.columns.begin + pair, row, first, second);
    } else {
      store(halves.columns.begin + pair, row, first, 0.f);
      const int column = halves.column(pair, true);
      if (column >= 0) store(column, row, second, 0.f);
    }
  }

 private:
  __device__ void store(int column, int row, float sum, float gate) const {
    const T value = from_float<T>(
        activated<T, ACTIVATION, GATED>(params.up_bias, params.gate_bias, column, sum, gate));
    T* to = reinterpret_cast<T*>(hidden.at(row, (column - origin) * sizeof(T)));
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank)
      *(CLUSTER == 1 ? to : cluster_shared(to, rank)) = value;
  }
};

template <int CLUSTER>
__device__ __forceinline__ void sync_blocks() {
  if constexpr (CLUSTER == 1)
    __syncthreads();
  else
    cluster_sync();
}

// Adds up a part of out, `width` packs of four columns at a time: as few as give work to all
// blocks. Threads at the same pack have every so many-th share, AT_ONCE on their way at once.
template <typename T>
__device__ __forceinline__ void add_up(const MlpParams& params, int shares, float* scratch,
                                       int pitch) {
  constexpr int AT_ONCE = 12;
  const int packs = params.rows * (pitch / 4);
  const int64_t share_size = int64_t(params.rows) * pitch;
  int width = 8;
  while (width < SMALL_M_THREADS / 4 && width * int(gridDim.x) < packs) width *= 2;
  const int groups = SMALL_M_THREADS / width;
  const int group = threadIdx.x / width, lane = threadIdx.x % width;
#pragma unroll 1
  for (int begin = blockIdx.x * width; begin < packs; begin += gridDim.x * width) {
    const int index = begin * 4 + threadIdx.x, row = index / pitch, column = index % pitch;
    const bool inside = threadIdx.x < width * 4 && row < params.rows && column < params.columns;
    float total = 0.f;
    if (inside && params.down_bias) total = element<T>(params.down_bias, column);
    if (inside && params.residual)
      total += element<T>(params.residual, row * params.residual_stride + column);
    const float* from = params.partials + min(begin + lane, packs - 1) * 4;
    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int first = group; first < shares; first += AT_ONCE * groups) {
      float4 values[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int share = first + i * groups;
        values[i] = {0.f, 0.f, 0.f, 0.f};
        if (share < shares)
          values[i] = __builtin_bit_cast(float4, ld_global_cg_128(from + share * share_size));
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        sum.x += values[i].x, sum.y += values[i].y, sum.z += values[i].z, sum.w += values[i].w;
      }
    }
    reinterpret_cast<float4*>(scratch)[threadIdx.x] = sum;
    __syncthreads();
    if (inside) {
#pragma unroll 4
      for (int i = 0; i < groups; ++i) total += scratch[i * width * 4 + threadIdx.x];
      static_cast<T*>(params.out)[row * params.out_stride + column] = from_float<T>(total);
    }
    __syncthreads();
  }
}

template <class Tile, Activation ACTIVATION, bool GATED, int CLUSTER>
__device__ __forceinline__ void whole_mlp(const MlpParams& params, char* smem) {
  using T = typename Tile::T;
  static_assert(Tile::SUMS >= SMALL_M_THREADS * 4, "add_up has the memory of the sums");
  float* sums = reinterpret_cast<float*>(smem + Tile::SUMS_OFFSET);
  const int clusters = gridDim.x / CLUSTER, cluster = blockIdx.x / CLUSTER;
  const int rank = blockIdx.x % CLUSTER, warp = threadIdx.x / 32;

  // ---- which hidden columns: those of the cluster, and of these those of this block ----
  const Share units(ceil_div(params.hidden, HIDDEN_UNIT), cluster, clusters);
  const int origin = units.begin * HIDDEN_UNIT;
  const int width = min(units.end * HIDDEN_UNIT, params.hidden) - origin;
  Share own(width, rank, CLUSTER);
  own.begin += origin, own.end += origin;
  const ColumnHalves up_columns(own);
  const EvenTiles up_tiles(GATED ? own.size() : up_columns.half);
  const T* up = static_cast<const T*>(params.up_weight) + own.begin * params.up_stride;
  const T* gate = static_cast<const T*>(params.gate_weight) + own.begin * params.gate_stride;
  const RowPairs<Tile> up_rows = {up,
                                  GATED ? gate : up + up_columns.half * params.up_stride,
                                  params.up_stride,
                                  GATED ? params.gate_stride : params.up_stride,
                                  GATED ? own.size() : own.size() - up_columns.half,
                                  up_tiles,
                                  shared_walk<Tile>(up_tiles, params.depth)};

  // ---- which columns of out: those of the block, and of these those of this warp ----
  const Share out_columns(params.columns, rank * SMALL_M_WARPS + warp, CLUSTER * SMALL_M_WARPS);
  const ColumnHalves down_columns(out_columns);
  const EvenTiles down_tiles(down_columns.half);
  const T* down =
      static_cast<const T*>(params.down_weight) + out_columns.begin * params.down_stride + origin;
  const RowPairs<Tile> down_rows = {down,
                                    down + down_columns.half * params.down_stride,
                                    params.down_stride,
                                    params.down_stride,
                                    out_columns.size() - down_columns.half,
                                    down_tiles,
                                    Walk{down_tiles.count, width, 0, Tile::SLICE}};

  // ---- weights and x on their way ----
  const SmemRows x = {smem + Tile::X_OFFSET, params.rows, SmemRows::pitch_of<T>(params.depth)};
  const SmemRows hidden = {x.at(params.rows, 0), params.rows, SmemRows::pitch_of<T>(width)};
  SliceRing<Tile> ring(smem);
  Slices<Tile, MlpWeights<Tile>> slices(
      MlpWeights<Tile>(up_rows, down_rows),
      RowCopy<Tile>{x, static_cast<const T*>(params.x), params.x_stride, params.depth},
      params.norm_weight == nullptr);
  ask_for_rows<Tile>(ring, slices, params);
  for (int column = own.begin + threadIdx.x; column < own.end; column += SMALL_M_THREADS) {
    if (params.up_bias) prefetch_l2(static_cast<const T*>(params.up_bias) + column);
    if (params.gate_bias) prefetch_l2(static_cast<const T*>(params.gate_bias) + column);
  }
  const int gap = round_up(width, Tile::SLICE) - width;  // to a whole number of slices
  for (int i = threadIdx.x; i < params.rows * gap; i += SMALL_M_THREADS)
    *reinterpret_cast<T*>(hidden.at(i / gap, (width + i % gap) * sizeof(T))) = T{};
  wait_for_rows<Tile>(x, params, sums + Tile::SUMS);
  if constexpr (CLUSTER > 1) cluster_sync();  // the others have begun: their memory can be written

  // ---- hidden columns ----
  small_m_products<Tile>(
      ring, slices, x, up_tiles, params.depth, sums,
      StoreHidden<Tile, ACTIVATION, GATED, CLUSTER>{params, hidden, up_columns, origin});
  sync_blocks<CLUSTER>();

  // ---- this cluster's share of out ----
  const int pitch = round_up(params.columns, 4);
  float* partials = params.partials + int64_t(cluster) * params.rows * pitch;
  multiply_tiles<Tile>(
      ring, slices, hidden, down_rows.walk,
      [&](int tile, const SmallMSums<Tile, Tile::MMA>& found) {
        found.template each<Tile::ROWS>(0, [&](int n, int half, int row, float sum) {
          const int column = down_columns.column(down_tiles.pair(tile, row), half);
          if (n < params.rows && column >= 0) partials[n * pitch + column] = sum;
        });
      });
  grid_barrier(params.counter);

  // ---- out ----
  add_up<T>(params, clusters, sums, pitch);
}
