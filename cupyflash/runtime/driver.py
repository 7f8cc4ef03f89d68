"""Functions of the NVIDIA driver that CuPy does not have, by ctypes."""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

DRIVER = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


@functools.cache
def function(name: str, *argument_types: Any) -> Callable[..., int]:
    """A function of the driver; it returns a status, 0 for success."""
    found = getattr(ctypes.CDLL(DRIVER), name)
    if argument_types:
        found.argtypes = argument_types
    return found


def with_context(call: Callable[..., int], *arguments: Any) -> int:
    """The status of a call of the driver, which knows no primary context in a new thread.

    The CUDA runtime makes it current at its first call in a thread; the driver never does.
    """
    status = call(*arguments)
    if status == INVALID_CONTEXT:
        import cupy

        cupy.cuda.runtime.free(0)  # of the current device; nothing but that
        status = call(*arguments)
    return status
