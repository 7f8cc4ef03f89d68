// Kernel arguments of diffusion/. The host reads them here (runtime/structs.py).
#pragma once
#include "../common/types.cuh"

// One update of a sampler. A sample with a threshold is clipped to it and divided by it; without
// thresholds it is clipped to `clip` and not divided:
//   x0 = clip(x_to_x0 * x + model_to_x0 * model) / threshold
//   x  = x0_to_x * x0 + x_to_x * x + model_to_x * model + noise_to_x * noise
struct DiffusionCoefficients {
  float x_to_x0;
  float model_to_x0;
  float x0_to_x;
  float x_to_x;
  float model_to_x;
  float noise_to_x;
};

struct DiffusionStepParams {
  const void* x;                              // [batch, sample_size]
  const void* model;                          // output of the model, like x
  const void* noise;                          // like x; null: drawn here
  void* out;                                  // like x
  const void* steps;                          // [batch] or [1] of int64_t, or null: `step`
  const DiffusionCoefficients* coefficients;  // [num_steps]
  const float* thresholds;                    // [batch], or null: `clip` without a division
  const int64_t* seeds;                       // [batch], or null: `seed`
  uint64_t seed;
  uint64_t step;
  int64_t batch;
  int64_t sample_size;
  int64_t steps_stride;  // 1, or 0: the same step for all samples
  int num_steps;
  int wide_steps;  // whether `steps` are 64-bit, not 32-bit
  float clip;      // x0 stays between -clip and clip
};
