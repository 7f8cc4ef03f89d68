// Packs of several neighbouring values, which are loaded and stored by up to 16 bytes at a time.
#pragma once
#include "../ptx/st_global.cuh"
#include "types.cuh"

template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
  T values[N];
};

// `data` is aligned to the size of the pack, or to 16 bytes if the pack is larger.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* data) {
  return *reinterpret_cast<const Pack<T, N>*>(data);
}

// The stores are written in PTX, because the compiler would split some of them into parts.
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
