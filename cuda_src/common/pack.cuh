// Several neighbouring values, moved in loads and stores of up to 16 bytes.
#pragma once
#include "../ptx/st_global.cuh"
#include "types.cuh"

template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
  T values[N];
};

// data lies on a multiple of the size of the pack, or of 16 bytes if that is less.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* data) {
  return *reinterpret_cast<const Pack<T, N>*>(data);
}

// In PTX: left to itself the compiler splits some of these stores into parts.
template <int N, typename T>
__device__ __forceinline__ void store_pack(T* data, const Pack<T, N>& pack) {
  if constexpr (sizeof(pack) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < int(sizeof(pack) / 16); ++i)
      st_global_128(reinterpret_cast<uint4*>(data) + i, reinterpret_cast<const uint4*>(&pack)[i]);
  } else {
    *reinterpret_cast<Pack<T, N>*>(data) = pack;
  }
}
