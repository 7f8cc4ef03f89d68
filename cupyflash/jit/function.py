"""A kernel on a device, launched with the bytes of one struct.

A function of CuPy takes an object of NumPy, and works out the sizes of the grid anew each time. Of
the host time of a small attention, both passes, that was a seventh.
"""

import ctypes
from typing import Any

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class Function:
    """Launches a kernel.

    Args:
        kernel: CuPy's function, which keeps the module loaded.
        argument_size: of the struct, in bytes.

    Attributes:
        ptr: the driver's handle.
    """

    def __init__(self, kernel: Any, argument_size: int) -> None:
        from cupy.cuda import driver

        self.kernel, self.ptr, self.argument_size = kernel, kernel.ptr, argument_size
        self._launch, self._launch_together = driver.launchKernel, driver.launchCooperativeKernel
        # The driver reads an argument before it returns. Calls at the same time have memory of
        # their own: (the argument, the address of its address, what holds that).
        self._free: list[tuple[memoryview, int, ctypes.Array]] = []

    def __call__(
        self,
        grid: int,
        threads: int,
        argument: bytes,
        shared_memory: int,
        stream: int,
        cooperative: bool = False,
    ) -> None:
        """Launches so many blocks of so many threads.

        Args:
            shared_memory: dynamic, in bytes.
            stream: its address.
            cooperative: whether blocks wait for each other, so that all must run at once.

        Raises:
            RuntimeError: the driver rejects it (CuPy's CUDADriverError).
            ValueError: the argument has another size than the struct.
        """
        try:
            memory = self._free.pop()
        except IndexError:
            memory = self._new_memory()
        try:
            memory[0][:] = argument
            launch, rest = (self._launch_together, ()) if cooperative else (self._launch, (0,))
            sizes = (grid, 1, 1, threads, 1, 1, shared_memory, stream, memory[1], *rest)
            try:
                launch(self.ptr, *sizes)
            except RuntimeError as error:
                if getattr(error, "status", None) != INVALID_CONTEXT:
                    raise
                make_context_current()
                launch(self.ptr, *sizes)
        finally:
            self._free.append(memory)

    def _new_memory(self) -> tuple[memoryview, int, ctypes.Array]:
        argument = ctypes.create_string_buffer(self.argument_size)
        address = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        return memoryview(argument).cast("B"), ctypes.addressof(address), address


def make_context_current() -> None:
    """Makes the primary context of the device current in this thread.

    The CUDA runtime does so at its first call in a thread; the driver never does.
    """
    import cupy

    cupy.cuda.runtime.free(0)  # does nothing else
