// Asynchronous copies from global to shared memory (sm_80).
// PTX ISA: "Data Movement and Conversion Instructions: Asynchronous copy", non-bulk.
#pragma once
#include "../common/types.cuh"

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or reads nothing and writes zeros if !valid. The copy bypasses L1 (.cg).
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}

// cp_async_16() for data that is read in order, and once: L2 fetches the whole line of 128 bytes,
// and evicts it before all other lines.
__device__ __forceinline__ void cp_async_stream_16(uint32_t dst, const void* src, bool valid) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, policy;\n"
      "}" ::"r"(dst),
      "l"(src), "r"(valid ? 16 : 0)
      : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most N of this thread's newest groups are still in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// cp_async_16() through registers, for sm_75, which has no cp.async.
__device__ __forceinline__ void copy_16(uint32_t dst, const void* src, bool valid) {
  uint4 value = {0, 0, 0, 0};
  if (valid) value = *static_cast<const uint4*>(src);
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// Commit and wait for either kind of copy. A copy through registers is complete when its store is
// issued, so there is nothing to wait for.
template <int ARCH>
__device__ __forceinline__ void copies_commit() {
  if constexpr (ARCH >= 80) cp_async_commit();
}

template <int ARCH>
__device__ __forceinline__ void copies_wait() {
  if constexpr (ARCH >= 80) cp_async_wait<0>();
}
