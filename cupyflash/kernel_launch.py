"""One kernel, ready to be launched: everything but what differs between calls is prepared."""

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy

from . import dependent_launch, jit
from .jit import compiler
from .kernel_config import KernelConfig

MAX_PLANS = 4096  # lengths that change with every call must not fill the memory


class Recorder(threading.local):
    """Launches of this thread with their parameters, while somebody wants them for `Prepared`."""

    launches: "list[tuple[Launch, bytes]] | None" = None


recorder = Recorder()


class Plan:
    """A plan runs with the device of its arrays as the current one, whatever is current outside."""

    def __init__(self, device: int) -> None:
        compiler.nvrtc()  # the error that names the pip line, where CuPy or NVRTC is missing
        import cupy

        self.device_id, self.device = device, cupy.cuda.Device(device)
        self.current_device = cupy.cuda.runtime.getDevice

    def __call__(self, *arguments: Any) -> tuple:
        if self.current_device() == self.device_id:
            return self.run(*arguments)
        with self.device:
            return self.run(*arguments)

    def run(self, *arguments: Any) -> tuple:
        raise NotImplementedError


class Launch:
    """One kernel with its grid and all of its parameters but the leading ones of each call.

    Attributes:
        workspace_size: floats of memory that a call needs besides.
        has_scratch: whether the parameters name memory of this call, or of its stream.
    """

    workspace_size = 0
    has_scratch = False

    def __init__(
        self, config: KernelConfig, device: int, grid: int, params: ctypes.Structure
    ) -> None:
        self.function = jit.load(config, device)
        self.grid = (grid,)
        self.block = (config.threads,)
        self.shared_memory = config.shared_memory
        self.cooperative = config.cooperative
        self.dependent = config.dependent and dependent_launch.is_possible(capability_of(device))
        num_fields = len(call_fields(params))
        self.pack = struct.Struct(f"{num_fields}Q").pack
        self.tail = bytes(params)[8 * num_fields :]
        self.dtype = numpy.dtype((numpy.void, ctypes.sizeof(config.params)))

    def __call__(self, stream: Any, *values: int, workspace: int = 0) -> None:
        self.start(stream, self.pack(*values) + self.tail)

    def start(self, stream: Any, params: bytes) -> None:
        """Launch with these bytes as the kernel's argument."""
        if recorder.launches is not None:
            recorder.launches.append((self, params))
        if self.dependent and dependent_launch.wanted():
            self.start_early(stream, params)
            return
        argument = numpy.frombuffer(params, self.dtype)
        self.function(
            self.grid, self.block, (argument,), self.shared_memory, stream, self.cooperative
        )

    def start_early(self, stream: Any, params: bytes) -> None:
        """Launch so that the kernel begins while the one before it in the stream still runs."""
        import cupy

        pointer = (stream or cupy.cuda.get_current_stream()).ptr
        sizes = (*self.grid, *self.block, self.shared_memory)
        dependent_launch.launch(self.function.ptr, *sizes, pointer, params)


class Prepared:
    """A call on arrays that stay where they are: from the second time on its launch alone.

    Calls of several launches, launches with scratch memory and those on a CPU stay as they are.
    """

    def __init__(self, call: Callable[[], Any], stream: Callable[[], Any]) -> None:
        self.call, self.stream = call, stream
        self.launch: Launch | None = None

    def __call__(self) -> Any:
        if self.launch is not None:
            self.launch.start(self.stream(), self.params)
            return self.result
        recorder.launches = launches = []
        try:
            result = self.call()
        finally:
            recorder.launches = None
        if len(launches) == 1 and not launches[0][0].has_scratch:
            ((self.launch, self.params),), self.result = launches, result
        return result


def call_fields(params: ctypes.Structure) -> list[str]:
    """The leading fields, which a call fills in: pointers, and numbers that change with it."""
    return [name for name, kind in params._fields_ if kind in (ctypes.c_void_p, ctypes.c_uint64)]


@functools.cache
def multiprocessors(device: int) -> int:
    """How many the GPU has."""
    import cupy

    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


@functools.cache
def capability_of(device: int) -> tuple[int, int]:
    """The compute capability of a GPU."""
    import cupy

    return divmod(int(cupy.cuda.Device(device).compute_capability), 10)


def keep(plans: dict[tuple, Any], key: tuple, plan: Any) -> None:
    """Put a plan into a cache of at most `MAX_PLANS`."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan
