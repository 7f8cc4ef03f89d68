"""One kernel, ready to be launched: everything but what differs between calls is prepared."""

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy

from .. import jit
from . import dependent_launch, partition
from .config import KernelConfig
from .gpu import capability_of, multiprocessors


class Recorder(threading.local):
    """Launches of this thread with their parameters, while somebody wants them for `Prepared`."""

    launches: "list[tuple[Launch, bytes] | None] | None" = None


recorder = Recorder()


def copies_were_made() -> None:
    """The call that is being recorded reads copies of its arrays: no launch alone repeats it."""
    if recorder.launches is not None:
        recorder.launches.append(None)


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
        self.multiprocessors = multiprocessors(device) if self.cooperative else 0
        self.was_too_large = False
        self.dependent = config.dependent and dependent_launch.is_possible(capability_of(device))
        num_fields = len(call_fields(params))
        self.pack = struct.Struct(f"{num_fields}Q").pack
        self.tail = bytes(params)[8 * num_fields :]
        self.dtype = numpy.dtype((numpy.void, ctypes.sizeof(config.params)))

    def __call__(self, stream: Any, *values: int, workspace: int = 0) -> None:
        self.start(stream, self.pack(*values) + self.tail)

    def start(self, stream: Any, params: bytes) -> None:
        """Launch with these bytes as the kernel's argument."""
        if self.dependent and dependent_launch.wanted():
            self.start_early(stream, params)
        else:
            argument = numpy.frombuffer(params, self.dtype)
            if self.cooperative:
                self.start_together(stream, argument)
            else:
                self.function(self.grid, self.block, (argument,), self.shared_memory, stream, False)
        if recorder.launches is not None:
            recorder.launches.append((self, params))

    def start_together(self, stream: Any, argument: numpy.ndarray) -> None:
        """Launch blocks that wait for each other.

        Raises:
            GridTooLarge: the stream has fewer multiprocessors than the grid was made for. Once
                that has happened it is asked ahead, as a refused launch would end a capture.
        """
        if self.was_too_large:
            found = self._multiprocessors_of(stream)
            if found < self.multiprocessors:
                raise partition.GridTooLarge(*self.grid, found)
        try:
            self.function(self.grid, self.block, (argument,), self.shared_memory, stream, True)
        except RuntimeError as error:  # CuPy's CUDADriverError
            if getattr(error, "status", None) != partition.TOO_LARGE or self.multiprocessors == 1:
                raise
            self.was_too_large = True
            found = self._multiprocessors_of(stream)
            if found >= self.multiprocessors:  # nobody says, as under some settings of MPS
                found = self.multiprocessors // 2
            raise partition.GridTooLarge(*self.grid, found) from None

    def _multiprocessors_of(self, stream: Any) -> int:
        """What the driver says that the stream has; those planned for where it does not."""
        import cupy

        pointer = (stream or cupy.cuda.get_current_stream()).ptr
        return partition.multiprocessors_of(pointer) or self.multiprocessors

    def start_early(self, stream: Any, params: bytes) -> None:
        """Launch so that the kernel begins while the one before it in the stream still runs."""
        import cupy

        pointer = (stream or cupy.cuda.get_current_stream()).ptr
        sizes = (*self.grid, *self.block, self.shared_memory)
        dependent_launch.launch(self.function.ptr, *sizes, pointer, params)


class Prepared:
    """A call on arrays that stay where they are: from the second time on its launch alone.

    Calls of several launches or of copied arrays, launches with scratch memory and those on a CPU
    stay as they are.
    """

    def __init__(self, call: Callable[[], Any], stream: Callable[[], Any]) -> None:
        self.call, self.stream = call, stream
        self.launch: Launch | None = None

    def __call__(self) -> Any:
        if self.launch is not None:
            try:
                self.launch.start(self.stream(), self.params)
            except partition.GridTooLarge:  # of a context that the launch was not prepared in
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


def call_fields(params: ctypes.Structure) -> list[str]:
    """The leading fields, which a call fills in: pointers, and numbers that change with it."""
    return [name for name, kind in params._fields_ if kind in (ctypes.c_void_p, ctypes.c_uint64)]
