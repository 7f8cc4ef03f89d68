"""The array libraries of the callers: how to read an array and where to allocate a result.

Nothing is converted on a GPU: the kernels need a pointer, a shape, strides and a dtype, and results
are allocated by the caller's own allocator, on the caller's device and stream.
"""

import contextlib
import functools
import math
import sys
from typing import Any, NamedTuple

import numpy

Array = Any

SEEDS = 2**63 - 1  # seeds of dropout that are drawn are less than this


class View(NamedTuple):
    """What the checks and the kernels need to know of an array, besides its pointer."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    device: int  # -1: the CPU


class NumpyLibrary:
    """NumPy arrays, on the CPU."""

    name = "numpy.ndarray"

    def signature(self, x: Array) -> tuple:
        """A hashable key of everything but the pointer; cheap."""
        return (x.shape, x.strides, x.dtype)

    def view(self, x: Array) -> View:
        strides = tuple(stride // x.itemsize for stride in x.strides)
        return View(x.shape, strides, x.dtype.name, -1)

    def on_cpu(self, x: Array) -> bool:
        return True

    def watched(self, x: Array) -> bool:
        return False

    traced = watched

    def wants_gradient(self, *arrays: Array) -> bool:
        return False

    def to_numpy(self, x: Array) -> numpy.ndarray:
        return x

    def from_numpy(
        self,
        x: numpy.ndarray,
        like: Array | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> Array:
        return x

    def strides_of_empty(self, shape: tuple[int, ...], like: View) -> tuple[int, ...]:
        return dense_strides(shape, range(len(shape)))

    def to_list(self, x: Array) -> list[int]:
        return x.tolist()

    def seed(self, value: int, like: Array) -> Array:
        """An int64 array of one element."""
        return numpy.array([value], numpy.int64)

    def random_seed(self, like: Array) -> Array:
        """The same with a value from the library's generator."""
        return numpy.random.randint(SEEDS, size=1, dtype=numpy.int64)

    def device(self, x: Array) -> int:
        return -1

    def put(self, x: numpy.ndarray, like: Array) -> Array:
        """A NumPy array in this library, on the device of ``like``."""
        return x


class CupyLibrary:
    """CuPy arrays; the stream is CuPy's current one."""

    name = "cupy.ndarray"

    def signature(self, x: Array) -> tuple:
        return (x.shape, x.strides, x.dtype.num, x.data.device_id)

    def view(self, x: Array) -> View:
        strides = tuple(stride // x.itemsize for stride in x.strides)
        return View(x.shape, strides, x.dtype.name, x.data.device_id)

    def on_cpu(self, x: Array) -> bool:
        return False

    def watched(self, x: Array) -> bool:
        return False

    traced = watched

    def wants_gradient(self, *arrays: Array) -> bool:
        return False

    def pointer(self, x: Array) -> int:
        return x.data.ptr

    def contiguous(self, x: Array) -> Array:
        return sys.modules["cupy"].ascontiguousarray(x)

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], like: Array) -> Array:
        """Uninitialised, dtype and device of ``like``; CuPy allocates C order, whatever strides."""
        return sys.modules["cupy"].ndarray(shape, like.dtype)

    def empty_strided(self, shape: tuple[int, ...], strides: tuple[int, ...], like: Array) -> Array:
        """`empty` with these strides (in elements) of a dense array."""
        cupy, item = sys.modules["cupy"], like.itemsize
        memory = cupy.cuda.alloc(math.prod(shape) * item)
        return cupy.ndarray(shape, like.dtype, memory, tuple(item * step for step in strides))

    def empty_float32(self, shape: tuple[int, ...], like: Array) -> Array:
        return sys.modules["cupy"].ndarray(shape, numpy.float32)

    def zeros_int32(self, size: int, like: Array) -> Array:
        return sys.modules["cupy"].zeros(size, numpy.int32)

    def zeros_like(self, x: Array) -> Array:
        return sys.modules["cupy"].zeros_like(x)

    def fill(self, x: Array, value: float) -> None:
        x.fill(value)

    def cast(self, x: Array, like: Array) -> Array:
        """x in the dtype of ``like``; itself if it has that."""
        return x.astype(like.dtype, copy=False)

    def float32(self, x: Array) -> Array:
        return x.astype(numpy.float32, copy=False)

    def seed(self, value: int, like: Array) -> Array:
        return sys.modules["cupy"].full(1, value, numpy.int64)

    def random_seed(self, like: Array) -> Array:
        try:
            return sys.modules["cupy"].random.randint(SEEDS, size=1, dtype=numpy.int64)
        except ImportError as error:
            raise ImportError(
                "cupyflash: without dropout_seed the seed comes from cupy.random, which needs "
                "cuRAND: pip install nvidia-curand-cu12 (CUDA 13: nvidia-curand)"
            ) from error

    def strides_of_empty(self, shape: tuple[int, ...], like: View) -> tuple[int, ...]:
        return dense_strides(shape, range(len(shape)))

    def stream(self, device: int) -> None:
        return None  # CuPy's current stream

    def to_list(self, x: Array) -> list[int]:
        return x.tolist()

    def device(self, x: Array) -> int:
        return x.data.device_id

    def put(self, x: numpy.ndarray, like: Array) -> Array:
        """A NumPy array on the device of ``like``, ready for every stream."""
        cupy = sys.modules["cupy"]
        with like.device:
            result = cupy.asarray(x)
            cupy.cuda.get_current_stream().synchronize()
        return result


class TorchLibrary:
    """torch tensors, on a GPU or on the CPU."""

    name = "torch.Tensor"

    def __init__(self) -> None:
        self.torch = sys.modules["torch"]
        # 0.1 µs instead of the 4 µs of torch.cuda.current_stream(); Triton relies on it too.
        self._raw_stream = getattr(self.torch._C, "_cuda_getCurrentRawStream", None)
        self._transforms_active = self.torch._C._are_functorch_transforms_active
        self._modes = self.torch._C._len_torch_dispatch_stack
        self._autocast = self.torch._C._is_any_autocast_enabled
        self._plain = self.torch.Tensor.__torch_dispatch__  # of all but tensor subclasses

    def signature(self, x: Array) -> tuple:
        return (x.shape, x.stride(), x.dtype, x.get_device())

    def view(self, x: Array) -> View:
        dtype = str(x.dtype).removeprefix("torch.")
        return View(tuple(x.shape), x.stride(), dtype, x.get_device())

    def on_cpu(self, x: Array) -> bool:
        return not x.is_cuda

    def watched(self, x: Array) -> bool:
        """Whether something around the call changes it: autocast or what `traced` names; 0.2 µs."""
        return self._autocast() or self.traced(x)

    def traced(self, x: Array) -> bool:
        """Whether torch has to see the call, for a transform of torch.func, a dispatch mode, a
        tensor subclass or a tensor without memory; torch.compile apart.
        """
        return (
            self._transforms_active()
            or self._modes() > 0
            or type(x).__torch_dispatch__ is not self._plain
            or x.is_meta
        )

    def wants_gradient(self, *arrays: Array) -> bool:
        for x in arrays:
            if x.requires_grad:
                return self.torch.is_grad_enabled()
        return False

    def to_numpy(self, x: Array) -> numpy.ndarray:
        """A view; a copy in float32 of bfloat16, which NumPy does not have."""
        x = x.detach()
        return (x.float() if x.dtype == self.torch.bfloat16 else x).numpy()

    def from_numpy(
        self,
        x: numpy.ndarray,
        like: Array | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> Array:
        """In the dtype of ``like``, with the strides that a GPU's result would have."""
        result = self.torch.from_numpy(x)
        if like is None:
            return result
        strides = strides or self.strides_of_empty(x.shape, self.view(like))
        return self.empty(x.shape, strides, like).copy_(result)

    def pointer(self, x: Array) -> int:
        return x.data_ptr()

    def contiguous(self, x: Array) -> Array:
        return x.contiguous()

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], like: Array) -> Array:
        """Uninitialised, dtype and device of ``like``."""
        if like.stride() == strides and like.shape == shape:
            return self.torch.empty_like(like)  # the same result in half the time
        return self.torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)

    empty_strided = empty

    def empty_float32(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.torch.empty(shape, dtype=self.torch.float32, device=like.device)

    def zeros_int32(self, size: int, like: Array) -> Array:
        return self.torch.zeros(size, dtype=self.torch.int32, device=like.device)

    def zeros_like(self, x: Array) -> Array:
        return self.torch.zeros_like(x)

    def fill(self, x: Array, value: float) -> None:
        x.fill_(value)

    def cast(self, x: Array, like: Array) -> Array:
        """x in the dtype of ``like``; itself if it has that."""
        return x.to(like.dtype)

    def float32(self, x: Array) -> Array:
        return x.detach().float()

    def seed(self, value: int, like: Array) -> Array:
        """A fill instead of a copy from the host: it needs no synchronisation."""
        return self.torch.full((1,), value, dtype=self.torch.int64, device=like.device)

    def random_seed(self, like: Array) -> Array:
        """From torch's generator of the device of ``like``."""
        return self.torch.randint(SEEDS, (1,), dtype=self.torch.int64, device=like.device)

    def strides_of_empty(self, shape: tuple[int, ...], like: View) -> tuple[int, ...]:
        """Dense, in the order of the axes of ``like``: a transposed q gives a transposed out.

        The last axis stays the innermost one, also beside an expanded axis (stride 0).
        """
        last = len(shape) - 1
        order = sorted(range(last), key=lambda axis: -like.strides[axis])
        return dense_strides(shape, [*order, last])

    def stream(self, device: int) -> "RawStream":
        if self._raw_stream is not None:
            return raw_stream(self._raw_stream(device))
        return raw_stream(self.torch.cuda.current_stream(device).cuda_stream)

    def to_list(self, x: Array) -> list[int]:
        return x.tolist()

    def device(self, x: Array) -> int:
        return x.get_device()

    def put(self, x: numpy.ndarray, like: Array) -> Array:
        """A NumPy array on the device of ``like``; ready for every stream, as ``to`` waits."""
        return self.torch.from_numpy(x).to(like.device)


class RawStream(NamedTuple):
    """A stream of another library, as CuPy's launch takes it."""

    ptr: int


@functools.lru_cache(maxsize=256)
def raw_stream(pointer: int) -> RawStream:
    return RawStream(pointer)


def dense_strides(shape: tuple[int, ...], order: Any) -> tuple[int, ...]:
    """Strides of a dense array whose axes lie in ``order``, the outermost first."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(list(order)):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


_libraries: dict[type, Any] = {}


def library_of(x: Array) -> Any:
    """The adapter of an array's library, or None."""
    kind = type(x)
    library = _libraries.get(kind)
    if library is None:
        library = _find(x)
        if library is not None:
            _libraries[kind] = library
    return library


def _find(x: Array) -> Any:
    if isinstance(x, numpy.ndarray):
        return _libraries.setdefault(numpy.ndarray, NumpyLibrary())
    for module, name, adapter in (
        ("cupy", "ndarray", CupyLibrary),
        ("torch", "Tensor", TorchLibrary),
    ):
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(x, kind):
            # One adapter a library, also for its subclasses.
            return _libraries.setdefault(kind, adapter())
    return None


def from_foreign(function: str, x: Array) -> Array:
    """An array of another library as a NumPy or CuPy array on the same memory.

    Raises:
        TypeError: it speaks neither DLPack nor ``__cuda_array_interface__``.
    """
    if hasattr(x, "__dlpack_device__") and hasattr(x, "__dlpack__"):
        if int(x.__dlpack_device__()[0]) == 1:  # kDLCPU
            try:
                return numpy.from_dlpack(x)
            except RuntimeError:  # a dtype that is none of NumPy's own, as bfloat16
                return numpy.asarray(x)
        import cupy

        return cupy.from_dlpack(x)
    if hasattr(x, "__cuda_array_interface__"):
        import cupy

        return cupy.asarray(x)
    raise TypeError(
        f"{function}: arrays must be NumPy, CuPy or torch arrays, or speak DLPack or "
        f"__cuda_array_interface__, got {type(x).__name__}"
    )


def to_foreign(result: Array, like: Array) -> Array:
    """A result in the library of a foreign array, if that library can import it."""
    with contextlib.suppress(AttributeError):
        namespace = like.__array_namespace__()
        try:
            return namespace.from_dlpack(result)
        except BufferError:  # of such a dtype
            return namespace.asarray(result)
    return result


def compiling() -> bool:
    """Whether torch.compile traces the caller: it could not trace what follows; 0.2 µs."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()
