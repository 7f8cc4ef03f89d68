"""The device of an engine: arrays of NumPy, CuPy or torch, copies that do not wait, CUDA graphs.

Everything is enqueued on the current stream of the library, in order. `Device.write` copies numbers
from memory of its own, so that the caller may change them at once, and `Device.read` returns before
the numbers have come.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy

from ...runtime.array import Array
from ...runtime.launch import dependent_launches
from ...runtime.lookup import library_of
from ...runtime.scratch import no_garbage_collected
from ..place import Place


class Device:
    """The CPU, with NumPy; the base class of the others.

    Args:
        like: an array there, whose dtype the pools of keys and values have.

    Attributes:
        captures: whether it has CUDA graphs.
    """

    captures = False

    def __init__(self, like: Array) -> None:
        self.like, library = like, library_of(like)
        view, name = library.view(like), library.name.partition(".")[0]
        self.place, self.dtype = Place(name, "cpu" if view.device < 0 else "cuda"), view.dtype

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Context in which the device is the current one, and nothing records a gradient."""
        yield

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Zeros; ``dtype`` is a name."""
        with self.current():
            return self.place.zeros(shape, dtype)

    def pool(self, shape: tuple[int, ...]) -> Array:
        """Zeros with the dtype of ``like``."""
        return self.zeros(shape, self.dtype)

    def integers(self, *shape: int) -> Array:
        """Zeros, int32."""
        return self.zeros(shape, "int32")

    def write(self, target: Array, values: numpy.ndarray) -> None:
        """Copy int32 numbers into a contiguous array of their shape."""
        target[...] = values

    def read(self, x: Array) -> Callable[[], list[int]]:
        """A function that waits for the numbers of x, as they are now in the stream's order."""
        found = x.tolist()
        return lambda: found

    def take(self, x: Array, rows: Array) -> Array:
        """x[rows], a copy."""
        return x[rows]

    def free_memory(self) -> int | None:
        """Bytes that can be allocated; None on the CPU, where nobody knows."""
        return None

    def capture(self, launches: Callable[[], Array]) -> Callable[[], Array]:
        """A function that repeats the launches on the same arrays, and returns the same result.

        They run once before they are captured, so that kernels are compiled and what is kept is
        allocated. So running them twice must have the same result as running them once.
        """
        raise NotImplementedError("engine: a CUDA graph needs a GPU, got arrays on the CPU")


class _Copies:
    """The pinned memory of copies that CuPy has enqueued, kept until they have ended.

    CuPy gives pinned memory away as soon as nobody refers to it. An engine may be dropped before
    its last copies have run, so this is not a part of it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: collections.deque[tuple[Any, numpy.ndarray]] = collections.deque()

    def keep(self, memory: numpy.ndarray, event: Any) -> None:
        """Keep memory until ``event``, which is recorded behind its copy."""
        with self.lock:
            while self.waiting and self.waiting[0][0].done:
                self.waiting.popleft()
            self.waiting.append((event, memory))


_copies = _Copies()


class CupyDevice(Device):
    """A GPU, with CuPy."""

    captures = True

    def __init__(self, like: Array) -> None:
        super().__init__(like)
        import cupy
        import cupyx

        self.cupy, self.empty_pinned = cupy, cupyx.empty_pinned
        self.graph_pool = cupy.cuda.MemoryPool()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with self.like.device:
            yield

    def write(self, target: Array, values: numpy.ndarray) -> None:
        if not values.size:
            return
        stream = self.cupy.cuda.get_current_stream()
        staged = self.empty_pinned(values.shape, "int32")
        staged[...] = values
        target.set(staged, stream=stream)
        _copies.keep(staged, stream.record())

    def read(self, x: Array) -> Callable[[], list[int]]:
        stream, host = self.cupy.cuda.get_current_stream(), self.empty_pinned(x.shape, "int32")
        x.get(stream=stream, out=host, blocking=False)
        event = stream.record()
        _copies.keep(host, event)

        def wait() -> list[int]:
            event.synchronize()
            return host.tolist()

        return wait

    def take(self, x: Array, rows: Array) -> Array:
        return self.cupy.take(x, rows)

    def free_memory(self) -> int | None:
        free, _ = self.cupy.cuda.runtime.memGetInfo()
        return free + self.cupy.get_default_memory_pool().free_bytes()

    def capture(self, launches: Callable[[], Array]) -> Callable[[], Array]:
        current = self.cupy.cuda.get_current_stream
        stream = self.cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(current().record())
        # The graphs of a device run one after the other, and what one of them leaves behind is read
        # before the next begins: they share memory, which belongs to none of them.
        with self.cupy.cuda.using_allocator(self.graph_pool.malloc), stream, no_garbage_collected():
            launches()
            stream.synchronize()
            stream.begin_capture()
            try:
                with dependent_launches():
                    result = launches()
            finally:
                graph = stream.end_capture()

        def replay() -> Array:
            graph.launch(current())
            return result

        return replay


class TorchDevice(Device):
    """The CPU or a GPU, with torch."""

    def __init__(self, like: Array) -> None:
        super().__init__(like)
        import torch

        self.torch, self.captures = torch, like.is_cuda
        self.graph_pool = torch.cuda.graph_pool_handle() if like.is_cuda else None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with self.torch.no_grad(), self.torch.cuda.device(self.like.get_device()):
            yield  # the device -1, the CPU, changes nothing

    def write(self, target: Array, values: numpy.ndarray) -> None:
        source = self.torch.from_numpy(numpy.array(values, "int32"))
        if self.captures:  # torch keeps pinned memory from others until its copy has ended
            source = source.pin_memory()
        target.copy_(source, non_blocking=self.captures)

    def read(self, x: Array) -> Callable[[], list[int]]:
        if not self.captures:
            return super().read(x)
        host = self.torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(x, non_blocking=True)
        event = self.torch.cuda.Event()
        event.record()

        def wait() -> list[int]:
            event.synchronize()
            return host.tolist()

        return wait

    def take(self, x: Array, rows: Array) -> Array:
        return x.index_select(0, rows)

    def free_memory(self) -> int | None:
        if not self.captures:
            return None
        cuda = self.torch.cuda
        return cuda.mem_get_info()[0] + cuda.memory_reserved() - cuda.memory_allocated()

    def capture(self, launches: Callable[[], Array]) -> Callable[[], Array]:
        if not self.captures:
            return super().capture(launches)
        cuda = self.torch.cuda
        stream, graph = cuda.Stream(), cuda.CUDAGraph()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            launches()
        # The graphs share memory, as those of CuPy do.
        options = {"pool": self.graph_pool, "stream": stream, "capture_error_mode": "thread_local"}
        with no_garbage_collected(), cuda.graph(graph, **options), dependent_launches():
            result = launches()

        def replay() -> Array:
            graph.replay()
            return result

        return replay


def device_of(like: Array) -> Device:
    """The device of an array of NumPy, CuPy or torch.

    Raises:
        TypeError: any other object.
    """
    library = library_of(like)
    kinds = {"numpy.ndarray": Device, "cupy.ndarray": CupyDevice, "torch.Tensor": TorchDevice}
    if library is None:
        fact = "arrays must be NumPy or CuPy arrays or torch tensors"
        raise TypeError(f"engine: {fact}, got {type(like).__name__}")
    return kinds[library.name](like)
