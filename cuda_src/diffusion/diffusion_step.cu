// One update of a sampler (DDPM, DDIM: whatever the table of coefficients says) in one pass:
// predicted sample, clipping, mean, fresh noise. See DiffusionCoefficients for the formula.
//
// Elementwise; a thread has VECTOR neighbouring elements. Noise that is not given is drawn here:
// the four numbers of elements 4 i to 4 i + 3 come from the counter (i, step) and the key `seed`,
// so equal calls give equal bits, whatever the launch looks like, and each step has its own noise.
// A step outside of the table, which only the device knows, gives NaN.
#include "../common/convert.cuh"
#include "../common/diffusion_params.cuh"
#include "../common/pack.cuh"
#include "../common/philox.cuh"
#include "normal.cuh"

constexpr int THREADS = 256;

template <typename T, typename MODEL, bool DRAW, int VECTOR>
__global__ void __launch_bounds__(THREADS)
    diffusion_step(const __grid_constant__ DiffusionStepParams params) {
  // ---- which elements, which step ----
  const int64_t first = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * VECTOR;
  if (first >= params.batch * params.sample_size) return;
  int64_t step = params.step;
  if (params.steps) {
    const int64_t index = params.steps_stride ? first / params.sample_size : 0;
    step = params.wide_steps ? static_cast<const int64_t*>(params.steps)[index]
                             : static_cast<const int*>(params.steps)[index];
  }
  const bool known = step >= 0 && step < params.num_steps;
  const DiffusionCoefficients c = params.coefficients[known ? step : 0];

  // ---- noise ----
  float noise[VECTOR] = {};
  if (c.noise_to_x != 0.f) {
    if constexpr (DRAW) {
      constexpr int DRAWS = VECTOR < 4 ? 1 : VECTOR / 4;
#pragma unroll
      for (int i = 0; i < DRAWS; ++i) {
        const uint64_t number = first / 4 + i;
        const uint4 random =
            philox(params.seed, uint32_t(number), uint32_t(number >> 32), uint32_t(step));
        const float2 lower = normal_pair(random.x, random.y);
        const float2 upper = normal_pair(random.z, random.w);
        const float drawn[4] = {lower.x, lower.y, upper.x, upper.y};
        if constexpr (VECTOR >= 4) {
#pragma unroll
          for (int j = 0; j < 4; ++j) noise[4 * i + j] = drawn[j];
        } else {
          const int j = first % 4;
          noise[0] = j < 2 ? (j == 0 ? drawn[0] : drawn[1]) : (j == 2 ? drawn[2] : drawn[3]);
        }
      }
    } else {
      const auto pack = load_pack<VECTOR>(static_cast<const T*>(params.noise) + first);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) noise[i] = to_float(pack.values[i]);
    }
  }

  // ---- update ----
  const auto x = load_pack<VECTOR>(static_cast<const T*>(params.x) + first);
  const auto model = load_pack<VECTOR>(static_cast<const MODEL*>(params.model) + first);
  Pack<T, VECTOR> out;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const float x_i = to_float(x.values[i]), model_i = to_float(model.values[i]);
    const float guess = c.x_to_x0 * x_i + c.model_to_x0 * model_i;
    // Written so that a NaN stays one.
    const float x0 = guess > params.clip    ? params.clip
                     : guess < -params.clip ? -params.clip
                                            : guess;
    const float mean = c.x0_to_x * x0 + c.x_to_x * x_i + c.model_to_x * model_i;
    out.values[i] = from_float<T>(known ? mean + c.noise_to_x * noise[i] : INF - INF);
  }
  store_pack<VECTOR>(static_cast<T*>(params.out) + first, out);
}
