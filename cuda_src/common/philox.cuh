// Philox4x32-7: random numbers from a counter, so that the backward draws those of the forward
// again, whatever their tiles. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
// cupyflash/philox.py is the same for the CPU.
#pragma once
#include "../ptx/math.cuh"

// `stream` tells users apart who may have the same seed: 0 dropout of attention and tokens, 1 noise
// of samplers, 2 dropout of rows before a norm.
__device__ __forceinline__ uint4 philox(uint64_t seed, uint32_t x, uint32_t y, uint32_t z,
                                        uint32_t stream = 0) {
  constexpr int ROUNDS = 7;  // the fewest that pass all tests of the paper
  uint4 counter = make_uint4(x, y, z, stream);
  uint2 key = make_uint2(uint32_t(seed), uint32_t(seed >> 32));
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    // From a product in C++ the compiler makes a signed one, and adds what is missing.
    const uint64_t a = mul_wide(0xD2511F53u, counter.x);
    const uint64_t b = mul_wide(0xCD9E8D57u, counter.z);
    counter = make_uint4(uint32_t(b >> 32) ^ counter.y ^ key.x, uint32_t(b),
                         uint32_t(a >> 32) ^ counter.w ^ key.y, uint32_t(a));
    key.x += 0x9E3779B9u;
    key.y += 0xBB67AE85u;
  }
  return counter;
}
