// One update of a sampler in one pass: predicted sample, clipping, mean, fresh noise. The table of
// coefficients makes it a step of DDPM or DDIM; DiffusionCoefficients has the formula.
//
// Elementwise: a thread has LOADS packs of VECTOR neighbouring elements, and reads nothing that
// another thread writes. Noise that is not given is drawn here: the four numbers of elements 4 i to
// 4 i + 3 come from the counter (i, step) and the key `seed`, so equal calls give equal bits,
// whatever the launch looks like, and each step has its own noise. With a seed for each sample the
// elements are counted from the beginning of the sample. An index of a step that is outside of the
// table gives NaN, as only the device knows it.
#include "../common/philox.cuh"
#include "../common/words.cuh"
#include "normal.cuh"
#include "params.cuh"

constexpr int THREADS = 256;
constexpr uint32_t NOISE_STREAM = 1;  // of Philox; other uses of a seed have other streams

// Noise for the elements from `first` on.
template <int VECTOR>
__device__ __forceinline__ void draw(float (&noise)[VECTOR], int64_t first, uint64_t seed,
                                     int64_t step) {
  constexpr int DRAWS = VECTOR < 4 ? 1 : VECTOR / 4;
#pragma unroll
  for (int i = 0; i < DRAWS; ++i) {
    const uint64_t number = first / 4 + i;
    const uint4 random =
        philox(seed, uint32_t(number), uint32_t(number >> 32), uint32_t(step), NOISE_STREAM);
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
}

// PER_SAMPLE: samples have thresholds or seeds of their own.
template <typename T, typename MODEL, bool DRAW, bool PER_SAMPLE, int LOADS, int VECTOR>
__global__ void __launch_bounds__(THREADS)
    diffusion_step(const __grid_constant__ DiffusionStepParams params) {
  // ---- read ----
  const auto first_of = [&](int load) {
    return ((int64_t(blockIdx.x) * LOADS + load) * THREADS + threadIdx.x) * VECTOR;
  };
  const int64_t size = params.batch * params.sample_size;
  Words<T, VECTOR> x[LOADS], given[LOADS];
  Words<MODEL, VECTOR> model[LOADS];
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int64_t first = first_of(load);
    if (first >= size) continue;
    x[load] = load_words<VECTOR>(static_cast<const T*>(params.x) + first);
    model[load] = load_words<VECTOR>(static_cast<const MODEL*>(params.model) + first);
    if (!DRAW && params.noise)
      given[load] = load_words<VECTOR>(static_cast<const T*>(params.noise) + first);
  }

  int64_t step = params.step, noise_begin = 0;
  uint64_t seed = params.seed;
  float limit = params.clip, shrink = 1.f;
  DiffusionCoefficients c;
#pragma unroll
  for (int load = 0; load < LOADS; ++load) {
    const int64_t first = first_of(load);
    if (first >= size) continue;
    // ---- which step, noise ----
    if (load == 0 || PER_SAMPLE || params.steps_stride) {
      if constexpr (PER_SAMPLE) {
        const int64_t sample = first / params.sample_size;
        if (params.thresholds) {
          limit = params.thresholds[sample];
          shrink = 1.f / limit;
        }
        if (DRAW && params.seeds) {
          seed = uint64_t(params.seeds[sample]);
          noise_begin = sample * params.sample_size;
        }
      }
      if (params.steps) {
        const int64_t index = params.steps_stride ? first / params.sample_size : 0;
        step = params.wide_steps ? static_cast<const int64_t*>(params.steps)[index]
                                 : static_cast<const int*>(params.steps)[index];
      }
      const bool known = step >= 0 && step < params.num_steps;
      c = params.coefficients[known ? step : 0];
      if (!known) c.x_to_x = INF - INF;
    }
    float noise[VECTOR] = {};
    if constexpr (DRAW) {  // also for steps without noise: a branch would be slower
      draw(noise, first - noise_begin, seed, step);
    } else if (c.noise_to_x != 0.f) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) noise[i] = given[load].at(i);
    }

    // ---- update ----
    float out[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
      const float x_i = x[load].at(i), model_i = model[load].at(i);
      const float guess = c.x_to_x0 * x_i + c.model_to_x0 * model_i;
      const float x0 = PER_SAMPLE ? clamp_nan(guess, limit) * shrink : clamp_nan(guess, limit);
      const float mean = c.x0_to_x * x0 + c.x_to_x * x_i + c.model_to_x * model_i;
      out[i] = mean + c.noise_to_x * noise[i];
    }
    store_words<VECTOR>(static_cast<T*>(params.out) + first, round_words<T>(out));
  }
}
