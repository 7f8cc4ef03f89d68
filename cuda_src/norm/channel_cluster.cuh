// Channels last, read once: a cluster of blocks keeps the positions of a sample, of the channels of
// a tile, in shared memory. Each thread copies what it will read itself, so nobody waits for a
// block but where sums are added up.
#pragma once
#include "../ptx/cluster.cuh"
#include "../ptx/cp_async.cuh"
#include "channel_tile.cuh"

constexpr int CLUSTER = 8;       // blocks
constexpr int TILE_GROUPS = 64;  // of a tile at most

// The packs of a thread in shared memory, of one tensor or more: LOADS of each.
template <typename T, int THREADS, int LOADS, int VECTOR>
struct SharedPacks {
  uint4* packs;  // [LOADS, THREADS], those of this thread

  __device__ explicit SharedPacks(uint4* smem) : packs(smem + threadIdx.x) {}

  // Begins to copy positions BEGIN to END.
  template <int BEGIN, int END, typename V>
  __device__ __forceinline__ void copy(Walk<V>& from, int count) const {
#pragma unroll 4
    for (int i = BEGIN; i < END; ++i) {
      const V* const data = from.next();
      if (i < count) cp_async_stream_16(smem_address(packs + i * THREADS), data, true);
    }
  }

  __device__ __forceinline__ Words<T, VECTOR> operator[](int i) const {
    const uint4 v = packs[i * THREADS];
    return {{v.x, v.y, v.z, v.w}};
  }
};

// A value of every block, for each group of a tile, in the shared memory of all of them.
template <typename V>
struct ClusterValues {
  V values[CLUSTER][TILE_GROUPS];

  __device__ void send(int group, V value) {
    const uint32_t own = cluster_rank();
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) *cluster_shared(&values[own][group], rank) = value;
  }

  // Of the first `blocks` blocks, after they have sent theirs; the same bits in all of them.
  __device__ V sum(int group, int blocks) const {
    V sum = values[0][group];
    for (int rank = 1; rank < blocks; ++rank) sum = sum + values[rank][group];
    return sum;
  }
};
