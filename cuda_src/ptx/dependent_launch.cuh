// Programmatic dependent launch (sm_90): a kernel that begins while the one before it in the stream
// still runs. PTX ISA: "Parallel synchronization instructions: griddepcontrol".
//
// A kernel may begin early if its launch allows it (cupyflash/runtime/launch.py) and every block
// of the kernel before it has called `launch_next_kernel` or has exited. Before
// `wait_for_previous_kernel` it may read what the caller of such launches promises to be constant
// (weights and biases, positions, page tables, older keys and values), prefetch into L2, and write
// to shared memory. Everything else, above all every store to global memory, must come after the
// wait. These rules suffice:
//
// - The wait ends when the whole previous grid has ended and its writes are visible. At least one
//   block of that grid has waited for the grid before it. So after the wait all earlier kernels
//   have ended, however many of them overlap, and global memory may be written or reused exactly as
//   without overlap: buffers, counters that return to 0, flags.
// - A kernel must not read the data of earlier kernels by ld.global.nc, nor by a load that the
//   compiler may move above the wait, because that data changes while the kernel runs.
// - Blocks that wait for each other (grid barriers, clusters) run at the same time, as always: the
//   next kernel gets no multiprocessor before all of them have begun.
//
// Both functions do nothing in an ordinary launch and on GPUs older than sm_90.
#pragma once

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void launch_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
