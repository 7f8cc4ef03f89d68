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

  // Where a row of a tensor begins.
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

struct GroupStrides {
  int64_t batch;
  int64_t channel;
  int64_t position;
};

// n / divisor for 0 <= n < 2^31. Granlund, Montgomery: Division by invariant integers using
// multiplication, 1994.
struct Divisor {
  uint32_t multiplier;
  int shift;

  __device__ int divide(int n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

struct GroupNormShape {
  int64_t batch;
  int groups;
  int channels;  // of a group
  int positions;
  float inverse_size;  // of a group
  float eps;
  Divisor packs;  // by the packs of a channel, where a pack does not cross channels
};

// Channels last: which channels a block has. Either `groups` whole groups or one of `parts` parts
// of a single group.
struct ChannelTiling {
  int tiles;
  int groups;
  int parts;
  int channels;
};

struct GroupNormFwdParams {
  const void* x;
  const void* weight;  // [channels]
  const void* bias;    // [channels]
  void* out;
  float* stats;     // [batch, groups, 2]: mean, 1 / deviation; or null in one step
  float* partials;  // count, mean, sum of squared deviations of each piece; or null in one step
  GroupStrides x_strides;
  GroupStrides out_strides;
  GroupNormShape shape;
  int unit_blocks;  // three_steps.cuh; or 0
  int shares;       // group_norm_fwd_pipelined: blocks that have a group, each some of the samples
  ChannelTiling tiling;
};

// group_ring.cuh: how the blocks share the samples.
struct GroupRing {
  int slices;        // of a sample, if it is parted
  int teams;         // of blocks
  int blocks;        // of a team that have positions
  int span;          // positions of a block; the last one may have less
  int slots;         // of the ring in shared memory
  int sample_slots;  // slots of a sample, or of a slice of it
  int flight;        // samples about which blocks may be telling each other
  int runs;          // groups of a pack, at most
};

// The blocks exchange partial statistics of the groups of a slice through a workspace that is 0 at
// first, then used by one launch after the other. The last word of each of these uint4 is a tag.
struct GroupNormFwdRingBase {
  const void* x;
  const void* weight;  // [channels]
  const void* bias;    // [channels]
  void* out;
  float* stats;      // [batch, groups, 2]: mean, 1 / deviation; or null
  uint4* told;       // [teams, flight, groups, blocks]: count, mean, sum of squared deviations
  uint4* found;      // [teams, flight, groups]: mean, 1 / deviation
  uint32_t* rounds;  // [MAX_TEAMS], equal: samples or slices of a team in launches before this one
  GroupStrides x_strides;
  GroupStrides out_strides;
  GroupNormShape shape;
  GroupRing ring;
};

struct alignas(64) GroupNormFwdRingParams {
  TensorMap maps[1];  // of x, for slices
  GroupNormFwdRingBase base;
};

struct GroupNormBwdRingBase {
  const void* dout;
  const void* x;
  const void* weight;  // [channels]
  const void* bias;    // [channels]
  const float* stats;  // [batch, groups, 2]: mean, 1 / deviation
  void* dx;
  float* partials;   // [2, teams * blocks, channels]: shares of dweight and dbias
  uint4* told;       // [teams, flight, groups, blocks]: sums of what dx needs the means of
  uint4* found;      // [teams, flight, groups]: slope, constant, 1 / deviation
  uint32_t* rounds;  // [MAX_TEAMS], equal: samples or slices of a team in launches before this one
  GroupStrides dout_strides;
  GroupStrides x_strides;
  GroupStrides dx_strides;
  GroupNormShape shape;
  GroupRing ring;
};

struct alignas(64) GroupNormBwdRingParams {
  TensorMap maps[2];  // of x and dout, for slices
  GroupNormBwdRingBase base;
};

// Of last_block.cuh, for the groups in turn.
constexpr int GROUP_COUNTERS = 64;

struct GroupNormBwdParams {
  const void* dout;
  const void* x;
  const void* weight;
  const void* bias;
  const float* stats;
  void* dx;
  void* dweight;    // [channels]
  void* dbias;      // [channels]
  int* counters;    // GROUP_COUNTERS of them, 0 before the launch and after it; in one step
  float* partials;  // shares of dweight and dbias: [channels, shares (of clusters: times
                    // their blocks), 2], or [2, batch, channels]
  float* pieces;    // the same of each piece; or null in one step
  float* means;     // [batch, groups, 2]: what dx needs of the group; or null in one step
  GroupStrides dout_strides;
  GroupStrides x_strides;
  GroupStrides dx_strides;
  GroupNormShape shape;
  int unit_blocks;  // three_steps.cuh; or 0
  int shares;       // in one step: how many blocks or clusters have a group, at most
  ChannelTiling tiling;
};
