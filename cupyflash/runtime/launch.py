"""Launches of one kernel, prepared except for the pointers and numbers that differ between calls.

A dependent launch (sm_90 and newer) begins while the kernel before it in the stream still runs.
``cuda_src/ptx/dependent_launch.cuh`` says what the kernel may do before that one has ended. CuPy's
launches have no attributes, so a dependent launch goes through the driver's cuLaunchKernelEx. A
cluster of blocks must lie within one GPC, so only the driver knows how many clusters run at the
same time.
"""

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator
from ctypes import c_char_p, c_void_p
from typing import Any

from .. import jit
from . import driver
from .config import KernelConfig
from .gpu import all_multiprocessors, capability_of, multiprocessors

OLDEST_DRIVER = 12030  # the oldest whose CUDA graphs can contain dependent launches
CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # two of CUlaunchAttributeID
pack_value = struct.Struct("i4xi60x").pack  # CUlaunchAttribute: id, value
pack_cluster = struct.Struct("i4x3I52x").pack  # the same: id, blocks of a cluster
# CUlaunchConfig: grid, block, shared memory, stream, attributes, their number.
pack_config = struct.Struct("3I3II4xQQI4x").pack


class _Thread(threading.local):
    dependent = False


_thread = _Thread()


@contextlib.contextmanager
def dependent_launches() -> Iterator[None]:
    """Context in which kernels that can do so begin while the kernel before them still runs.

    It is valid for this thread. The caller promises that nothing in the context, and nothing on the
    stream that may still run, writes what such kernels read at once: weights and biases, and the
    positions, page tables and earlier keys and values of a cache. Work outside of a CUDA graph
    cannot break the promise for launches that are captured into it, because a graph begins after
    all earlier work on its stream has ended.
    """
    before, _thread.dependent = _thread.dependent, True
    try:
        yield
    finally:
        _thread.dependent = before


def dependent_wanted() -> bool:
    """Whether this thread is in the context `dependent_launches`."""
    return _thread.dependent


@functools.cache
def dependent_possible(capability: tuple[int, int]) -> bool:
    """Whether a GPU of this capability and the installed driver can do dependent launches."""
    import cupy

    return capability >= (9, 0) and cupy.cuda.runtime.driverGetVersion() >= OLDEST_DRIVER


def launch_dependent(
    function: int, grid: int, threads: int, shared_memory: int, stream: int, params: bytes
) -> None:
    """Launches a kernel with the one argument ``params``; ``function`` is the handle of the kernel.

    Raises:
        RuntimeError: the driver rejects it.
    """
    attribute = pack_value(PROGRAMMATIC_STREAM_SERIALIZATION, True)
    at = ctypes.cast(attribute, c_void_p).value
    config = pack_config(grid, 1, 1, threads, 1, 1, shared_memory, stream, at, 1)
    start = driver.function("cuLaunchKernelEx", c_char_p, c_void_p, c_void_p, c_void_p)
    status = driver.with_context(start, config, function, (c_char_p * 1)(params), None)
    if status:
        asked = f"{grid} blocks of {threads} threads with {shared_memory} bytes of shared memory"
        raise RuntimeError(f"cupyflash: cuLaunchKernelEx failed with {status}: {asked}")


class Recorder(threading.local):
    """The launches of this thread and their parameters, recorded while `Prepared` asks for them."""

    launches: "list[tuple[Launch, bytes] | None] | None" = None


recorder = Recorder()


def copies_were_made() -> None:
    """Marks the recorded call as one that copies arrays: its launch alone cannot repeat it."""
    if recorder.launches is not None:
        recorder.launches.append(None)


class Launch:
    """One kernel with its grid and all of its parameters except the first ones, which a call gives.

    Attributes:
        workspace_size: number of floats of workspace that a call needs.
        has_scratch: whether the parameters point to memory of this call, or of its stream.
    """

    workspace_size = 0
    has_scratch = False

    def __init__(
        self, config: KernelConfig, device: int, grid: int, params: ctypes.Structure
    ) -> None:
        self.function = jit.load(config, device)
        self.grid, self.threads = max(1, grid), config.threads
        self.shared_memory = config.shared_memory
        self.cooperative = config.cooperative
        self.multiprocessors = multiprocessors(device) if self.cooperative else 0
        self.was_too_large = False
        self.dependent = config.dependent and dependent_possible(capability_of(device))
        num_fields = len(call_fields(params))
        self.pack = struct.Struct(f"{num_fields}Q").pack
        self.tail = bytes(params)[8 * num_fields :]

    def argument(
        self, *values: int, stream: Any = None, workspace: int = 0, bias: int = 0
    ) -> bytes:
        """The struct that the kernel gets: the pointers and numbers of a call, then the rest.

        Args:
            stream, workspace, bias: for kernels whose argument has more that changes with each
                call: the addresses of ``workspace_size`` floats, and of the bias of attention.
        """
        return self.pack(*values) + self.tail

    def start(self, stream: Any, params: bytes) -> None:
        """Launches the kernel with these bytes as its argument."""
        if self.dependent and dependent_wanted():
            sizes = (self.grid, self.threads, self.shared_memory)
            launch_dependent(self.function.ptr, *sizes, pointer_of(stream), params)
        elif self.cooperative:
            self.start_together(stream, params)
        else:
            pointer = stream.ptr if stream else pointer_of(stream)
            self.function(self.grid, self.threads, params, self.shared_memory, pointer)
        if recorder.launches is not None:
            recorder.launches.append((self, params))

    def start_together(self, stream: Any, params: bytes) -> None:
        """Launches blocks that wait for each other (a cooperative launch).

        Raises:
            GridTooLarge: the stream has fewer multiprocessors than the grid was made for. Once
                that has happened, the number is asked for before each launch, because a refused
                launch would end a capture.
        """
        if self.was_too_large:
            found = self._multiprocessors_of(stream)
            if found < self.multiprocessors:
                raise driver.GridTooLarge(self.grid, found)
        sizes = (self.shared_memory, pointer_of(stream))
        try:
            self.function(self.grid, self.threads, params, *sizes, cooperative=True)
        except RuntimeError as error:  # CuPy's CUDADriverError
            if getattr(error, "status", None) != driver.TOO_LARGE or self.multiprocessors == 1:
                raise
            self.was_too_large = True
            found = self._multiprocessors_of(stream)
            if found >= self.multiprocessors:  # some settings of MPS do not report the limit
                found = self.multiprocessors // 2
            raise driver.GridTooLarge(self.grid, found) from None

    def _multiprocessors_of(self, stream: Any) -> int:
        """The number that the driver reports for the stream, or else the one of the plan."""
        return driver.multiprocessors_of(pointer_of(stream)) or self.multiprocessors


class Prepared:
    """A call on arrays whose addresses do not change: from the second time on, only its launch.

    Calls that launch several kernels or copy arrays, that need scratch memory, or that run on a CPU
    are repeated as a whole.
    """

    def __init__(self, call: Callable[[], Any], stream: Callable[[], Any]) -> None:
        self.call, self.stream = call, stream
        self.launch: Launch | None = None

    def __call__(self) -> Any:
        if self.launch is not None:
            try:
                self.launch.start(self.stream(), self.params)
            except driver.GridTooLarge:  # this context has fewer multiprocessors than the first one
                return self.call()
            return self.result
        recorder.launches = launches = []
        try:
            result = self.call()
        finally:
            recorder.launches = None
        if len(launches) == 1 and not launches[0][0].has_scratch:
            ((self.launch, self.params),), self.result = launches, result
        return result


def pointer_of(stream: Any) -> int:
    """The handle of a stream of CuPy, or of its current stream for None."""
    import cupy

    return (stream or cupy.cuda.get_current_stream()).ptr


def call_fields(params: ctypes.Structure) -> list[str]:
    """The names of the fields that a call fills in: pointers, and numbers that change with it."""
    return [name for name, kind in params._fields_ if kind in (ctypes.c_void_p, ctypes.c_uint64)]


def clusters_at_once(config: KernelConfig, device: int) -> int:
    """The number of clusters of a kernel that a device runs at the same time.

    Without clusters (``config.cluster`` is 1) it is the number of blocks, of which a multiprocessor
    runs ``config.blocks``.

    Raises:
        RuntimeError: the driver does not report it.
    """
    found = multiprocessors(device)
    if config.cluster == 1:
        return config.blocks * found
    return max(1, _clusters_of_all(config, device) * found // all_multiprocessors(device))


@functools.cache
def _clusters_of_all(config: KernelConfig, device: int) -> int:
    """The number of clusters that run at the same time on the whole GPU."""
    import cupy

    function = jit.load(config, device)
    attribute = pack_cluster(CLUSTER_DIMENSION, config.cluster, 1, 1)
    at = ctypes.cast(attribute, c_void_p).value
    block = config.threads, 1, 1, config.shared_memory
    launch = pack_config(config.cluster, 1, 1, *block, 0, at, 1)
    count = ctypes.c_int()
    ask = driver.function("cuOccupancyMaxActiveClusters", c_void_p, c_void_p, c_char_p)
    with cupy.cuda.Device(device):
        status = driver.with_context(ask, ctypes.byref(count), function.ptr, launch)
    if status or not count.value:
        got = f"status {status}, {count.value} clusters of {config.cluster} blocks"
        raise RuntimeError(f"cupyflash: cuOccupancyMaxActiveClusters failed with {got}")
    return count.value
