// Programmatic dependent launch (sm_90): a kernel that begins while the one before it in the stream
// still runs. PTX ISA: "Parallel synchronization instructions: griddepcontrol".
//
// A kernel may begin early if its launch allows it (cupyflash/dependent_launch.py) and every block
// of the kernel before it has called `launch_next_kernel`, or ended. What it may do before
// `wait_for_previous_kernel`: read what the caller of such launches promises to be constant
// (weights, older keys and values), prefetch into L2, write to shared memory. Everything else, and
// above all every store, comes after. Why that is enough:
//
// - The wait is for the end of the whole previous grid, with all that it wrote. That grid, in some
//   block at least, has waited for the one before it. So behind the wait everything earlier has
//   ended, however many kernels overlap, and memory may be written, or used anew for something
//   else, exactly as without overlap: buffers, counters that return to 0, flags.
// - Data of earlier kernels must not be read by ld.global.nc, nor by anything the compiler may move
//   up: it changes during the life of this kernel.
// - Blocks that wait for each other (grid barriers, clusters) run at once as ever: the next kernel
//   gets no room before all of them have begun.
//
// Both do nothing in an ordinary launch, and on older GPUs.
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
