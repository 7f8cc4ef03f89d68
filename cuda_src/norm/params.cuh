// Kernel arguments of norm/. The host reads them here (runtime/structs.py).
#pragma once
#include "../common/types.cuh"

// The rows of a tensor: everything but its last, contiguous dimension, in up to four axes.
constexpr int ROW_AXES = 4;

struct RowStrides {
  int64_t axis[ROW_AXES];  // in elements, outermost first
};

struct NormShape {
  int64_t rows;
  int64_t sizes[ROW_AXES];  // of the axes of the rows
  int axes;                 // how many of them are used
  int columns;
  float inverse_columns;
  float eps;

  // Visits (axis, index) of each axis of a row. Divides only if there are several; an Index has
  // room for rows then.
  template <typename Index, typename Row, class Visit>
  __device__ void each_axis(Row row, const Visit& visit) const {
#pragma unroll 1
    for (int axis = axes - 1; axis > 0; --axis) {
      const Index size = Index(sizes[axis]), outer = Index(row) / size;
      visit(axis, Index(row) - outer * size);
      row = outer;
    }
    visit(0, row);
  }

  // Returns the offset of a row of a tensor, in elements.
  template <typename Row>
  __device__ int64_t at(const RowStrides& strides, Row row) const {
    int64_t offset = 0;
    each_axis<Row>(row, [&](int axis, int64_t index) { offset += index * strides.axis[axis]; });
    return offset;
  }
};

struct NormFwdParams {
  const void* x;         // [rows, columns]
  const void* residual;  // [rows, columns] or null
  const void* weight;    // [columns]
  const void* bias;      // [columns] or null, as for RMSNorm
  void* out;             // [rows, columns]
  void* residual_out;    // [rows, columns]: x + residual; null without residual
  float* stats;          // [rows, 2]: mean (0 for RMSNorm), 1 / deviation; or null
  RowStrides x_strides;
  RowStrides residual_strides;
  RowStrides out_strides;  // of residual_out as well
  NormShape shape;
};

struct NormBwdParams {
  const void* dout;
  const void* x;  // what was normalised: residual_out of the forward, if there was a residual
  const void* weight;
  const float* stats;
  const void* dresidual;  // gradient of residual_out, or null
  void* dx;               // gradient of x and of residual
  float* partials;        // [1 or 2, splits, columns]: shares of dweight and dbias
  void* dweight;          // [columns]
  void* dbias;            // [columns], or null if it is not wanted
  int* counter;           // of grid_barrier, or null if sum_partials follows
  RowStrides dout_strides;
  RowStrides x_strides;
  RowStrides dresidual_strides;
  RowStrides dx_strides;
  NormShape shape;
  int64_t splits;  // of norm_bwd_weight
};

struct DropoutAddParams {
  const void* x;         // [rows, columns]
  const void* residual;  // [rows, columns] or null
  void* out;             // [rows, columns], dtype of residual
  const int64_t* seed;
  RowStrides x_strides;
  RowStrides residual_strides;
  RowStrides out_strides;
  NormShape shape;
  int threshold;  // of 2^16, how many are dropped
  float scale;    // of those that are kept
};

struct SumPartialsParams {
  const float* partials;  // [1 or 2, rows, columns]
  void* first;            // [columns]: sum over the rows
  void* second;           // [columns] or null
  int64_t rows;
  int64_t columns;
};
