"""Adapters of NumPy and CuPy, which read arrays and allocate results.

Results are allocated by the caller's own allocator, on the caller's device and stream.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from . import loaded
from .array import SEEDS, Array, Empty, View, allocated, dense_strides


@functools.cache
def _name(dtype: numpy.dtype) -> str:
    """``dtype.name``, which NumPy takes 2 µs to make."""
    return dtype.name


class Library:
    """The adapter of an array library; the methods here are those of one without autograd.

    Attributes:
        name: the name of its arrays in messages.
        has_autograd: whether it records gradients, and has transforms that track arrays.
    """

    name = ""
    has_autograd = False

    def read(self, arrays: Sequence[Array | None]) -> tuple[list[tuple | None], list[int]]:
        """The signatures and the pointers of arrays, None and 0 for None."""
        pointers = [0 if x is None else self.pointer(x) for x in arrays]
        return [None if x is None else self.signature(x) for x in arrays], pointers

    def is_strided(self, x: Array) -> bool:
        """Whether x has strides, which sparse and nested tensors do not; 0.1 µs."""
        return True

    def traced(self, *arrays: Any) -> bool:
        """Whether the library must see the call as an operator."""
        return False

    def replaced(self, *arrays: Any) -> bool:
        """Whether an array is a stand-in, such as a tracer, without the numbers of its own."""
        return False

    def wants_gradient(self, *arrays: Array | None) -> bool:
        """Whether a result without a gradient would lose one."""
        return False

    def followed(self, *arrays: Array) -> bool:
        """Whether `what_follows` may return something; this test is cheaper."""
        return False

    def what_follows(self, *arrays: Array, gradients: bool = True) -> str:
        """The name of what tracks these arrays, so that no kernel may take them; "" for nothing."""
        return ""

    def wrote(self, *arrays: Array) -> None:
        """Tells the library that a kernel has changed these arrays."""

    def determinism(self) -> str:
        """The setting of the library for nondeterministic algorithms: "error", "warn" or ""."""
        return ""

    def strides_of_empty(self, shape: tuple[int, ...], like: View) -> tuple[int, ...]:
        """The strides (in elements) of a result that belongs to ``like``; C order."""
        return dense_strides(shape, range(len(shape)))

    def allocator(self, *results: Empty) -> Callable[[Array], tuple[list[Array], list[int]]]:
        """A function that allocates these on the device of its argument; their pointers, too."""
        return functools.partial(allocated, self, results)

    def to_list(self, x: Array) -> list[int]:
        return x.tolist()

    def reshape(self, shape: tuple[int, ...], x: Array) -> Array:
        return x.reshape(shape)


class NumpyLibrary(Library):
    """NumPy arrays, on the CPU."""

    name = "numpy.ndarray"

    def signature(self, x: Array) -> tuple:
        """A hashable key of everything except the pointer; cheap."""
        return (x.shape, x.strides, x.dtype)

    def view(self, x: Array) -> View:
        item = max(1, x.itemsize)
        return View(x.shape, tuple(stride // item for stride in x.strides), _name(x.dtype), -1)

    def on_cpu(self, x: Array) -> bool:
        return True

    def pointer(self, x: Array) -> int:
        return x.__array_interface__["data"][0]

    def to_numpy(self, x: Array) -> numpy.ndarray:
        return x

    def from_numpy(
        self, x: numpy.ndarray, like: Array | None = None, strides: tuple[int, ...] | None = None
    ) -> Array:
        return x

    def cast(self, x: Array, like: Array) -> Array:
        """x in the dtype of ``like``; itself if it has that."""
        return x.astype(like.dtype, copy=False)

    def copy(self, x: Array) -> Array:
        return x.copy()

    def seed(self, value: int, like: Array) -> Array:
        return numpy.array([value], numpy.int64)

    def random_seed(self, like: Array) -> Array:
        """An int64 array of one element from the library's generator."""
        return numpy.random.randint(SEEDS, size=1, dtype=numpy.int64)

    def arange(self, count: int, like: Array) -> Array:
        """int32, on the device of ``like``."""
        return numpy.arange(count, dtype=numpy.int32)

    def device(self, x: Array) -> int:
        return -1

    def put(self, x: numpy.ndarray, like: Array) -> Array:
        """A NumPy array in this library, on the device of ``like``."""
        return x


def _on_its_device(method: Callable) -> Callable:
    """Runs a method of `CupyLibrary` with the device of its last argument as the current one.

    CuPy allocates on the current device. Arrays that are allocated while the stream of it records a
    CUDA graph are held as long as that exists, as its replays use them (scratch.py); so does torch.
    """

    @functools.wraps(method)
    def run(self: "CupyLibrary", *arguments: Any) -> Array:
        x = arguments[-1]
        if self.current_device() == x.data.device_id:
            return self.held(method(self, *arguments))
        with x.device:
            return self.held(method(self, *arguments))

    return run


class CupyLibrary(Library):
    """CuPy arrays; the stream is CuPy's current one of their device."""

    name = "cupy.ndarray"

    def __init__(self) -> None:
        from .scratch import hold_memory, unused_memory

        self.cupy = loaded.cupy
        self.hold_memory, self.unused_memory = hold_memory, unused_memory
        self.current_device = self.cupy.cuda.runtime.getDevice
        self.current_stream = self.cupy.cuda.get_current_stream
        self.is_capturing = self.cupy.cuda.runtime.streamIsCapturing

    def held(self, x: Array) -> Array:
        """x itself, which a graph now holds if one is being recorded; see `_on_its_device`.

        If none is, memory is freed that destroyed graphs held.
        """
        stream = self.current_stream().ptr
        if stream and self.is_capturing(stream):
            self.hold_memory(stream, x)
        elif self.unused_memory:
            self.unused_memory.clear()
        return x

    def signature(self, x: Array) -> tuple:
        return (x.shape, x.strides, x.dtype.num, x.data.device_id, type(x))

    def view(self, x: Array) -> View:
        """The view. If strides are no multiples of an element, its dtype is one that all refuse.

        Those of an axis with one index do not matter, and none without elements.
        """
        item, dtype = x.itemsize, _name(x.dtype)
        if x.size and any(step % item for n, step in zip(x.shape, x.strides) if n > 1):
            dtype += f" at unaligned strides {x.strides}"
        return View(x.shape, tuple(step // item for step in x.strides), dtype, x.data.device_id)

    def on_cpu(self, x: Array) -> bool:
        return False

    def owner(self, x: Array) -> Any:
        """The object that owns the memory of x, for weak references."""
        return x if x.base is None else x.base

    def pointer(self, x: Array) -> int:
        pointer = x.data.ptr
        if pointer % 16 and pointer % x.itemsize and x.size:
            fact = f"arrays must be aligned to their elements of {x.itemsize} bytes"
            raise ValueError(f"cupyflash: {fact}, got address {pointer:#x}")
        return pointer

    @_on_its_device
    def contiguous(self, x: Array) -> Array:
        return self.cupy.ascontiguousarray(x)

    @_on_its_device
    def copy(self, x: Array) -> Array:
        return x.copy()

    @_on_its_device
    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], like: Array) -> Array:
        """Uninitialised, with dtype and device of ``like``; always in C order with CuPy."""
        return self.cupy.ndarray(shape, like.dtype)

    @_on_its_device
    def empty_strided(self, shape: tuple[int, ...], strides: tuple[int, ...], like: Array) -> Array:
        """`empty` with these strides (in elements) of a dense array."""
        item = like.itemsize
        memory = self.cupy.cuda.alloc(math.prod(shape) * item)
        return self.cupy.ndarray(shape, like.dtype, memory, tuple(item * step for step in strides))

    @_on_its_device
    def empty_float32(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.cupy.ndarray(shape, numpy.float32)

    @_on_its_device
    def zeros_int32(self, size: int, like: Array) -> Array:
        return self.cupy.zeros(size, numpy.int32)

    @_on_its_device
    def zeros_like(self, x: Array) -> Array:
        return self.cupy.zeros_like(x)

    def fill(self, x: Array, value: float) -> None:
        with x.device:
            x.fill(value)

    @_on_its_device
    def cast(self, x: Array, like: Array) -> Array:
        return x.astype(like.dtype, copy=False)

    @_on_its_device
    def float32(self, x: Array) -> Array:
        return x.astype(numpy.float32, copy=False)

    @_on_its_device
    def seed(self, value: int, like: Array) -> Array:
        return self.cupy.full(1, value, numpy.int64)

    @_on_its_device
    def random_seed(self, like: Array) -> Array:
        try:
            return self.cupy.random.randint(SEEDS, size=1, dtype=numpy.int64)
        except ImportError as error:
            raise ImportError(
                "cupyflash: without dropout_seed the seed comes from cupy.random, which needs "
                "cuRAND: pip install nvidia-curand-cu12 (CUDA 13: nvidia-curand)"
            ) from error

    @_on_its_device
    def with_columns(self, columns: int, x: Array) -> Array:
        """A copy whose last axis has this number of columns, with zeros after those of x."""
        words = numpy.dtype(f"u{x.itemsize}")  # any dtype, bit by bit
        result = self.cupy.zeros((*x.shape[:-1], columns), words)
        result[..., : x.shape[-1]] = x.view(words)
        return result.view(x.dtype)

    def stream(self, device: int) -> None:
        return None  # CuPy's current stream

    @_on_its_device
    def to_list(self, x: Array) -> list[int]:
        return x.tolist()

    @_on_its_device
    def arange(self, count: int, like: Array) -> Array:
        return self.cupy.arange(count, dtype=numpy.int32)

    @_on_its_device
    def reshape(self, shape: tuple[int, ...], x: Array) -> Array:
        return x.reshape(shape)

    def device(self, x: Array) -> int:
        return x.data.device_id

    @_on_its_device
    def put(self, x: numpy.ndarray, like: Array) -> Array:
        """A NumPy array on the device of ``like``, ready for every stream."""
        result = self.cupy.asarray(x)
        self.current_stream().synchronize()
        return result
