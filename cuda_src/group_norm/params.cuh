// Kernel arguments of group_norm/. The host reads them here (runtime/structs.py).
#pragma once
#include "../common/types.cuh"

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

// Three steps: how the blocks share a unit, which is a group in NCHW and a sample in NHWC. In NHWC
// the channels of a sample are cut into tiles: `groups` whole groups each, or one of `parts` parts
// of a single group.
struct StepTiling {
  int blocks;  // of a unit; 0 where a group is not done in three steps
  int tiles;
  int groups;
  int parts;
  int channels;  // of a tile
};

struct GroupNormFwdParams {
  const void* x;
  const void* weight;  // [channels]
  const void* bias;    // [channels]
  void* out;
  float* stats;     // [batch, groups, 2]: mean, 1 / deviation; or null in one step
  float* partials;  // [batch, groups, records, 3]: count, mean, squares; or null in one step
  GroupStrides x_strides;
  GroupStrides out_strides;
  GroupNormShape shape;
  StepTiling tiling;
  int shares;  // group_norm_fwd: blocks that share the samples of a group
};

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
  float* partials;  // partial sums of dweight and dbias: [channels, shares (of clusters: times
                    // their blocks), 2], or [2, batch, channels]
  float* pieces;    // the same of each piece of a unit; or null in one step
  float* means;     // [batch, groups, 2]: group means that dx needs; or null in one step
  GroupStrides dout_strides;
  GroupStrides x_strides;
  GroupStrides out_strides;  // of dx
  GroupNormShape shape;
  StepTiling tiling;
  int shares;  // in one step: how many blocks or clusters have a group, at most
};

// The groups take these counters in turn.
constexpr int GROUP_COUNTERS = 64;
