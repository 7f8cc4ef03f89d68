// A sum over the blocks of a cluster.
#pragma once
#include "../common/group_sum.cuh"
#include "../ptx/cluster.cuh"

// Of a value that all threads of a block have; every thread of the cluster gets the same bits.
// Before a block ends or uses `slot` again, the cluster must synchronise.
template <int CLUSTER, class V>
__device__ __forceinline__ V cluster_sum(V value, V& slot) {
  if (threadIdx.x == 0) slot = value;
  cluster_sync();
  value = *cluster_shared(&slot, threadIdx.x % CLUSTER);
#pragma unroll
  for (int mask = 1; mask < CLUSTER; mask *= 2) value = value + shuffle_xor(value, mask);
  return value;
}
