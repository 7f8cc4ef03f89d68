// Philox4x32-7 computes random numbers from a seed and a counter, so that the backward pass can
// draw those of the forward pass again, even with other tiles. cupyflash/runtime/philox.py computes
// the same on the CPU. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
#pragma once
#include "../ptx/math.cuh"

// `stream` gives uses that may have the same seed different numbers: 0 is for dropout in attention
// and for sampling tokens, 1 for the noise of diffusion samplers, 2 for dropout before a norm.
__device__ __forceinline__ uint4 philox(uint64_t seed, uint32_t x, uint32_t y, uint32_t z,
                                        uint32_t stream = 0) {
  constexpr int ROUNDS = 7;  // the fewest that pass all tests of the paper
  uint4 counter = make_uint4(x, y, z, stream);
  uint2 key = make_uint2(uint32_t(seed), uint32_t(seed >> 32));
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    // For a product in C++ the compiler would emit a signed multiplication and correct its result.
    const uint64_t a = mul_wide(0xD2511F53u, counter.x);
    const uint64_t b = mul_wide(0xCD9E8D57u, counter.z);
    counter = make_uint4(uint32_t(b >> 32) ^ counter.y ^ key.x, uint32_t(b),
                         uint32_t(a >> 32) ^ counter.w ^ key.y, uint32_t(a));
    key.x += 0x9E3779B9u;
    key.y += 0xBB67AE85u;
  }
  return counter;
}
