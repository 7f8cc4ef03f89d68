// A whole MLP of up to 16 rows in one cooperative launch; every weight is read once.
//
// A block has a share of the hidden columns. It computes them (few.cuh) into shared memory, and
// multiplies them with the columns of the down projection that belong to them: warps take tiles of
// 16 rows of its weights in turns. These products are shares of all of out. They go to global
// memory; when those of all blocks are there, each block adds up a part of out, always in the same
// order.
#include "../common/grid_barrier.cuh"
#include "few.cuh"

// The hidden columns of a block.
struct HiddenShare {
  int begin;
  int end;
};

// In whole tiles of UNIT columns.
template <int UNIT>
__device__ __forceinline__ HiddenShare hidden_share(int hidden) {
  const int64_t units = ceil_div(hidden, UNIT);
  return {int(units * blockIdx.x / gridDim.x) * UNIT,
          min(int(units * (blockIdx.x + 1) / gridDim.x) * UNIT, hidden)};
}

// This block's share of out, to `partials`.
template <class Tile>
__device__ __forceinline__ void multiply_down(const MlpParams& params, const SmemRows& hidden,
                                              const HiddenShare& share, int pitch) {
  using T = typename Tile::T;
  const int depth = share.end - share.begin, tiles = ceil_div(params.columns, 16);
  const T* down = static_cast<const T*>(params.down_weight) + share.begin;
  float* partials = params.partials + int64_t(blockIdx.x) * params.rows * pitch;
  const auto weights = [&](int tile, int g) -> WeightRows<T> {
    const int row = tile * 16 + g, last = params.columns - 1;
    return {down + min(row, last) * params.down_stride,
            down + min(row + 8, last) * params.down_stride};
  };
  const auto done = [&](int tile, FewSums<Tile, Tile::MMA>& sums) {
    sums.each([&](int n, int row, float sum) {
      const int column = tile * 16 + row;
      if (n < params.rows && column < params.columns) partials[n * pitch + column] = sum;
    });
  };
  stream_weights<Tile>(
      hidden, depth, 0, Tile::STEP, threadIdx.x / 32, tiles, FEW_WARPS, weights, [] {}, done);
}

// Adds up a part of out: a warp has every 16th share, a lane four columns.
template <typename T>
__device__ __forceinline__ void add_up(const MlpParams& params, float* scratch, int pitch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int packs = params.rows * (pitch / 4);
  const int64_t share = int64_t(params.rows) * pitch;
#pragma unroll 1
  for (int begin = blockIdx.x * 32; begin < packs; begin += gridDim.x * 32) {
    float4 sum = {0.f, 0.f, 0.f, 0.f};
    if (begin + lane < packs) {
      const float* from = params.partials + (begin + lane) * 4;
#pragma unroll 4
      for (int block = warp; block < int(gridDim.x); block += FEW_WARPS) {
        const float4 value = __builtin_bit_cast(float4, ld_global_cg_128(from + block * share));
        sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
      }
    }
    reinterpret_cast<float4*>(scratch)[threadIdx.x] = sum;
    __syncthreads();
    const int index = begin * 4 + threadIdx.x, row = index / pitch, column = index % pitch;
    if (threadIdx.x < 128 && row < params.rows && column < params.columns) {
      float total = params.down_bias ? element<T>(params.down_bias, column) : 0.f;
#pragma unroll
      for (int w = 0; w < FEW_WARPS; ++w) total += scratch[w * 128 + threadIdx.x];
      if (params.residual)
        total += element<T>(params.residual, row * params.residual_stride + column);
      static_cast<T*>(params.out)[row * params.out_stride + column] = from_float<T>(total);
    }
    __syncthreads();
  }
}

template <typename T, Activation ACTIVATION, bool GATED, int ROWS, int VECTOR, int ARCH,
          int SMEM_BYTES>
__global__ void __launch_bounds__(FEW_THREADS, 1)
    mlp_few(const __grid_constant__ MlpParams params) {
  using Tile = FewTile<T, ROWS, VECTOR, ARCH>;
  constexpr int UNIT = GATED ? TILE_PAIRS : 2 * TILE_PAIRS;
  static_assert(Tile::SUMS >= FEW_THREADS * 4, "add_up has the memory of the sums");
  extern __shared__ __align__(128) char smem[];
  float* sums = reinterpret_cast<float*>(smem);
  const HiddenShare share = hidden_share<UNIT>(params.hidden);
  const int width = share.end - share.begin;
  const SmemRows x = {smem + Tile::X_OFFSET, params.rows, SmemRows::pitch_of<T>(params.depth)};
  const SmemRows hidden = {x.at(params.rows, 0), params.rows, SmemRows::pitch_of<T>(width)};

  // ---- hidden columns ----
  auto weights = [&](int tile, int row) -> WeightRows<T> {
    const int column = share.begin + tile * UNIT + row, last = params.hidden - 1;
    const T* up = static_cast<const T*>(params.up_weight);
    const T* first = up + min(column, last) * params.up_stride;
    if constexpr (GATED) {
      const T* gate = static_cast<const T*>(params.gate_weight);
      return {first, gate + min(column, last) * params.gate_stride};
    } else {
      return {first, up + min(column + TILE_PAIRS, last) * params.up_stride};
    }
  };
  auto stage = [&] {
    for (int byte = threadIdx.x * 16; byte < params.rows * hidden.pitch; byte += FEW_THREADS * 16)
      *reinterpret_cast<uint4*>(hidden.data + byte) = uint4{0, 0, 0, 0};
    stage_rows<Tile>(x, static_cast<const T*>(params.x), params.x_stride, params.depth);
    __syncthreads();
    if (params.norm_weight) {
      normalise_rows<Tile>(x, params.depth, params.norm, params.norm_weight, params.norm_bias,
                           sums + Tile::SUMS);
      __syncthreads();
    }
  };
  auto finish = [&](int tile, int pair, int row, float first, float second) {
    T* to = reinterpret_cast<T*>(hidden.at(row, 0));
    const int column = tile * UNIT + pair;
    auto store = [&](int column, float sum, float gate) {
      if (column >= width) return;
      to[column] = from_float<T>(activated<T, ACTIVATION, GATED>(params.up_bias, params.gate_bias,
                                                                 share.begin + column, sum, gate));
    };
    store(column, first, second);
    if constexpr (!GATED) store(column + TILE_PAIRS, second, 0.f);
  };
  few_products<Tile>(x, sums, params.depth, 0, ceil_div(width, UNIT), 1, weights, stage, finish);
  __syncthreads();

  // ---- out ----
  const int pitch = round_up(params.columns, 4);
  multiply_down<Tile>(params, hidden, share, pitch);
  grid_barrier(params.counter);
  add_up<T>(params, sums, pitch);
}
