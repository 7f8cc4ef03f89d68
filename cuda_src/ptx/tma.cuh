// The copy engine of sm_90 (TMA): it copies tiles that a tensor map describes, copies runs of
// bytes, and adds runs of floats to global memory. PTX ISA: "Data Movement and Conversion
// Instructions: Bulk copy", "Tensor copy".
#pragma once
#include "../common/types.cuh"

// Prefetches a tensor map, before the first copy through it.
__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads the tile at these element coordinates (the innermost first), with the swizzle of the map.
// Elements outside the tensor arrive as zeros. The barrier always counts the bytes of a whole tile.
__device__ __forceinline__ void tma_load(uint32_t dst, const TensorMap& map, uint32_t barrier,
                                         int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Brings a tile to L2.
__device__ __forceinline__ void tma_prefetch_tile(const TensorMap& map, int column, int row,
                                                  int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map),
               "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// Loads one tile for every block of the cluster whose bit is set in `blocks`. In each of them the
// tile and the barrier that counts its bytes lie at the same shared addresses as here.
__device__ __forceinline__ void tma_load_multicast(uint32_t dst, const TensorMap& map,
                                                   uint32_t barrier, uint16_t blocks, int column,
                                                   int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(dst),
      "l"(&map), "r"(barrier), "h"(blocks), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Stores a tile; bulk_commit() and bulk_wait() wait for it. Elements outside the tensor are not
// written.
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32_t src, int column, int row,
                                          int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(src), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Changes the number of rows (dimension 1) of a tensor map in shared memory.
__device__ __forceinline__ void tensor_map_set_rows(TensorMap& map, uint32_t rows) {
  asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(&map))),
               "r"(rows)
               : "memory");
}

// Changes the address that a tensor map in shared memory begins at.
__device__ __forceinline__ void tensor_map_set_address(TensorMap& map, const void* address) {
  asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(&map))),
               "l"(address)
               : "memory");
}

// Must come before the first copy through a map in global memory that another kernel has written:
// the copy engine may still hold the old contents of the map.
__device__ __forceinline__ void tensor_map_acquire(const TensorMap& map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(&map) : "memory");
}

// Loads a run of bytes. The addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(barrier)
      : "memory");
}

// Copies a run of bytes in shared memory to global memory.
__device__ __forceinline__ void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src),
               "r"(bytes)
               : "memory");
}

// Adds a run of floats in shared memory to global memory. L2 does the additions.
__device__ __forceinline__ void bulk_reduce_add(float* dst, uint32_t src, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
      "r"(src), "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most N of this thread's newest groups still read shared memory.
template <int N>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Waits until at most N of this thread's newest groups are incomplete, their writes included.
template <int N>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Makes this thread's ordinary stores to shared memory visible to wgmma and to the copy engine.
// Every thread that has written calls it before the barrier that hands the data over.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for this thread's accesses to global memory.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Waits until the writes of all of this thread's groups are in L2, where its later copies and
// additions find them. bulk_wait() alone is not enough for that: it compiles to the wait for reads.
__device__ __forceinline__ void bulk_wait_done() {
  bulk_wait<0>();
  __threadfence();
  fence_async_proxy_global();
}
