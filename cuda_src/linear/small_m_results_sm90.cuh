// The results of linear_small_m_sm90 from its sums: which thread finishes which, and how.
#pragma once
#include "epilogue.cuh"
#include "small_m_block_sm90.cuh"

// Sends the sums of a block to the blocks that finish them; rows of x beyond the last eight that
// count are left out.
template <class L>
__device__ __forceinline__ void send_sums(const float (&acc)[L::ROWS / 8][4], float* sums,
                                          uint64_t& barrier, int rank, int rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int feature = threadIdx.x / 32 * 16 + part * 8 + lane / 4;
    const int half = feature / L::PLACES, place = feature % L::PLACES;
    const int share_row = half * L::SHARE + place % L::SHARE;
    float* to = sums + (rank * L::SHARE_ROWS + share_row) * L::SUMS_PITCH + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < L::ROWS / 8; ++n) {
      if (n * 8 < rows)
        send_pair<L>(to + n * 8, barrier, place / L::SHARE, acc[n][2 * part], acc[n][2 * part + 1]);
    }
  }
}

// A thread finishes one column, or the two that are rotated together, of every STEP-th row. It asks
// for what it adds to the sums of the products, or rotates them by, long before these are there.
template <class L>
struct SmallMResults {
  using T = typename L::T;
  static constexpr int STEP = L::CONSUMERS / L::SHARE;
  static constexpr int COUNT = ceil_div(L::ROWS, STEP);
  const LinearParams& params;
  const int place = threadIdx.x % L::SHARE;
  const int first_row = threadIdx.x / L::SHARE;
  const int second_column = L::ROTARY ? params.rotary.head_dim / 2 : 0;  // from the first
  int column;
  T bias = {}, second_bias = {}, residual[COUNT] = {};
  float2 angles[COUNT];

  // The tile is that of which the block has the places from `column` on.
  __device__ SmallMResults(const LinearParams& params, int column) : params(params) {
    begin(column);
  }
  __device__ void begin(int share_column) { column = share_column + place; }

  __device__ bool has(int i) const {
    return column < params.columns && first_row + i * STEP < params.rows;
  }
  __device__ bool rotated() const { return L::ROTARY && column < params.rotary.columns; }

  __device__ void load_bias() {
    if (column >= params.columns) return;
    const T* data = static_cast<const T*>(params.bias);
    const T* second = L::GATED ? static_cast<const T*>(params.gate_bias) : data;
    if (data) bias = data[column];
    if (L::HALVES == 2 && second) second_bias = second[column + second_column];
  }
  // Loads the residual or the angles, which depend on the row.
  __device__ void load_rows() {
    if (rotated()) {
      const int pair = column % params.rotary.head_dim;
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
        if (has(i)) angles[i] = RowRotation<T>(params, first_row + i * STEP).angle(pair);
    }
    if (L::ROTARY || params.residual == nullptr) return;
    const T* data = static_cast<const T*>(params.residual) + column;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (has(i)) residual[i] = data[(first_row + i * STEP) * params.residual_stride];
  }
  // Adds up the sums of all blocks of the cluster, and writes the results.
  template <Activation ACTIVATION>
  __device__ void store(const float* sums) const {
    T* out = static_cast<T*>(params.out) + column;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int row = first_row + i * STEP;
      if (!has(i)) continue;
      const float* own = sums + place * L::SUMS_PITCH + row;
      float value = to_float(bias), second = to_float(second_bias);
#pragma unroll
      for (int block = 0; block < L::CLUSTER; ++block) {
        value += own[block * L::SHARE_ROWS * L::SUMS_PITCH];
        if constexpr (L::HALVES == 2)
          second += own[(block * L::SHARE_ROWS + L::SHARE) * L::SUMS_PITCH];
      }
      if constexpr (L::ROTARY) {
        if (rotated()) RowRotation<T>::rotate(angles[i], value, second);
        out[row * params.out_stride + second_column] = from_float<T>(second);
      } else {
        value = L::GATED ? activate<ACTIVATION>(second) * value : activate<ACTIVATION>(value);
        value += to_float(residual[i]);
      }
      out[row * params.out_stride] = from_float<T>(value);
    }
  }
};
