"""Launches of kernels that begin while the kernel before them in the stream still runs (sm_90).

CuPy's launches have no attributes, so these are made by the driver's cuLaunchKernelEx. What such a
kernel may do before the one before it has ended: ``cuda_src/ptx/dependent_launch.cuh``.
"""

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Iterator
from ctypes import c_char_p, c_void_p

from . import driver

OLDEST_DRIVER = 12030  # whose graphs have such dependencies
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID in cuda.h
pack_attribute = struct.Struct("i4xi60x").pack  # CUlaunchAttribute: id, value
# CUlaunchConfig: grid, block, shared memory, stream, attributes, their number.
pack_config = struct.Struct("3I3II4xQQI4x").pack


class _Thread(threading.local):
    dependent = False


_thread = _Thread()


@contextlib.contextmanager
def dependent_launches() -> Iterator[None]:
    """Within, kernels that can do so begin while the kernel before them in the stream still runs.

    For this thread. The caller promises that nothing within, and nothing on the stream that may
    still run, writes what such kernels read at once: weights and biases, and of a cache positions
    and earlier keys and values. What is captured into a CUDA graph keeps the promise towards all
    around it, as the graph begins when everything before it has ended.
    """
    before, _thread.dependent = _thread.dependent, True
    try:
        yield
    finally:
        _thread.dependent = before


def wanted() -> bool:
    """Whether this thread is within `dependent_launches`."""
    return _thread.dependent


@functools.cache
def is_possible(capability: tuple[int, int]) -> bool:
    """On a GPU of this capability, with the driver there is."""
    import cupy

    return capability >= (9, 0) and cupy.cuda.runtime.driverGetVersion() >= OLDEST_DRIVER


def launch(
    function: int, grid: int, threads: int, shared_memory: int, stream: int, params: bytes
) -> None:
    """Launch a kernel of one argument, ``params``, by the handle of its function.

    Raises:
        RuntimeError: the driver rejects it.
    """
    attribute = pack_attribute(PROGRAMMATIC_STREAM_SERIALIZATION, True)
    at = ctypes.cast(attribute, c_void_p).value
    config = pack_config(grid, 1, 1, threads, 1, 1, shared_memory, stream, at, 1)
    start = driver.function("cuLaunchKernelEx", c_char_p, c_void_p, c_void_p, c_void_p)
    status = driver.with_context(start, config, function, (c_char_p * 1)(params), None)
    if status:
        asked = f"{grid} blocks of {threads} threads with {shared_memory} bytes of shared memory"
        raise RuntimeError(f"cupyflash: cuLaunchKernelEx failed with {status}: {asked}")
