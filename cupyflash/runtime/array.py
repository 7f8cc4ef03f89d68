"""The array libraries of the callers: how to read an array and where to allocate a result.

Nothing is converted on a GPU: the kernels need a pointer, a shape, strides and a dtype, and results
are allocated by the caller's own allocator, on the caller's device and stream.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

Array = Any

SEEDS = 2**63 - 1  # seeds of dropout that are drawn are less than this


class View(NamedTuple):
    """What the checks and the kernels need to know of an array, besides its pointer."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    device: int | str  # -1: the CPU; the name of a device that is neither CPU nor CUDA


class NumpyLibrary:
    """NumPy arrays, on the CPU."""

    name = "numpy.ndarray"
    has_autograd = False

    def signature(self, x: Array) -> tuple:
        """A hashable key of everything but the pointer; cheap."""
        return (x.shape, x.strides, x.dtype)

    def view(self, x: Array) -> View:
        item = max(1, x.itemsize)
        return View(x.shape, tuple(stride // item for stride in x.strides), x.dtype.name, -1)

    def is_strided(self, x: Array) -> bool:
        """Whether x has strides: no sparse or nested tensor; 0.1 µs."""
        return True

    def on_cpu(self, x: Array) -> bool:
        return True

    def watched(self, *arrays: Any) -> bool:
        return False

    traced = replaced = watched

    def wants_gradient(self, *arrays: Array) -> bool:
        return False

    def followed(self, *arrays: Array) -> bool:
        return False

    def what_follows(self, *arrays: Array, gradients: bool = True) -> str:
        return ""

    def pointer(self, x: Array) -> int:
        return x.__array_interface__["data"][0]

    def to_numpy(self, x: Array) -> numpy.ndarray:
        return x

    def from_numpy(
        self,
        x: numpy.ndarray,
        like: Array | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> Array:
        return x

    def cast(self, x: Array, like: Array) -> Array:
        """x in the dtype of ``like``; itself if it has that."""
        return x.astype(like.dtype, copy=False)

    def strides_of_empty(self, shape: tuple[int, ...], like: View) -> tuple[int, ...]:
        return dense_strides(shape, range(len(shape)))

    def to_list(self, x: Array) -> list[int]:
        return x.tolist()

    def reshape(self, shape: tuple[int, ...], x: Array) -> Array:
        return x.reshape(shape)

    def seed(self, value: int, like: Array) -> Array:
        """An int64 array of one element."""
        return numpy.array([value], numpy.int64)

    def random_seed(self, like: Array) -> Array:
        """The same with a value from the library's generator."""
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
    """Run a method of `CupyLibrary` with the device of its last argument as the current one.

    CuPy allocates and launches on the current device, and has a current stream for each device. All
    that is allocated while that stream records a CUDA graph is held as long as the graph exists, as
    its replays use the memory (scratch.py); torch does the same for its graphs.
    """

    @functools.wraps(method)
    def run(self: "CupyLibrary", *arguments: Any) -> Array:
        x = arguments[-1]
        if self.current_device() == x.data.device_id:
            return self.held(method(self, *arguments))
        with x.device:
            return self.held(method(self, *arguments))

    return run


class CupyLibrary:
    """CuPy arrays; the stream is CuPy's current one of their device."""

    name = "cupy.ndarray"
    has_autograd = False

    def __init__(self) -> None:
        self.cupy = sys.modules["cupy"]
        self.current_device = self.cupy.cuda.runtime.getDevice
        self.current_stream = self.cupy.cuda.get_current_stream
        self.is_capturing = self.cupy.cuda.runtime.streamIsCapturing

    def held(self, x: Array) -> Array:
        """x itself; see `_on_its_device`."""
        stream = self.current_stream().ptr
        if stream and self.is_capturing(stream):
            from .scratch import when_graph_is_gone

            when_graph_is_gone(stream, [x].clear)
        return x

    def signature(self, x: Array) -> tuple:
        return (x.shape, x.strides, x.dtype.num, x.data.device_id)

    def view(self, x: Array) -> View:
        """Where strides are no multiples of an element, the dtype says so: no kernel takes it."""
        item, dtype = x.itemsize, x.dtype.name
        if any(stride % item for stride in x.strides):
            dtype += f" at unaligned strides {x.strides}"
        return View(x.shape, tuple(step // item for step in x.strides), dtype, x.data.device_id)

    def is_strided(self, x: Array) -> bool:
        return True

    def on_cpu(self, x: Array) -> bool:
        return False

    def watched(self, *arrays: Any) -> bool:
        return False

    traced = replaced = watched

    def wants_gradient(self, *arrays: Array) -> bool:
        return False

    def followed(self, *arrays: Array) -> bool:
        return False

    def what_follows(self, *arrays: Array, gradients: bool = True) -> str:
        return ""

    def wrote(self, *arrays: Array) -> None:
        pass

    def owner(self, x: Array) -> Any:
        """The object that owns the memory of x, for weak references."""
        return x if x.base is None else x.base

    def determinism(self) -> str:
        """CuPy has no such switch."""
        return ""

    def pointer(self, x: Array) -> int:
        pointer = x.data.ptr
        if pointer % 16 and pointer % x.itemsize:
            fact = f"arrays must be aligned to their elements of {x.itemsize} bytes"
            raise ValueError(f"cupyflash: {fact}, got address {pointer:#x}")
        return pointer

    @_on_its_device
    def contiguous(self, x: Array) -> Array:
        return self.cupy.ascontiguousarray(x)

    @_on_its_device
    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], like: Array) -> Array:
        """Uninitialised, dtype and device of ``like``; CuPy allocates C order, whatever strides."""
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
        """x in the dtype of ``like``; itself if it has that."""
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
        """A copy with so many numbers on the last axis, zeros behind those of x."""
        words = numpy.dtype(f"u{x.itemsize}")  # any dtype, bit by bit
        result = self.cupy.zeros((*x.shape[:-1], columns), words)
        result[..., : x.shape[-1]] = x.view(words)
        return result.view(x.dtype)

    def strides_of_empty(self, shape: tuple[int, ...], like: View) -> tuple[int, ...]:
        return dense_strides(shape, range(len(shape)))

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
        self.cupy.cuda.get_current_stream().synchronize()
        return result


class TorchLibrary:
    """torch tensors, on a GPU or on the CPU."""

    name = "torch.Tensor"
    has_autograd = True

    def __init__(self) -> None:
        self.torch = sys.modules["torch"]
        # 0.1 µs instead of the 4 µs of torch.cuda.current_stream(); Triton relies on it too.
        self._raw_stream = getattr(self.torch._C, "_cuda_getCurrentRawStream", None)
        self._transforms_active = self.torch._C._are_functorch_transforms_active
        self._modes = self.torch._C._len_torch_dispatch_stack
        self._tracer = self.torch._C._get_tracing_state
        self.is_autocast = self.torch._C._is_any_autocast_enabled
        self._forward_mode = self.torch.autograd.forward_ad
        self._plain = self.torch.Tensor.__torch_dispatch__  # of all but tensor subclasses
        self._is_plain = {self.torch.Tensor: True}  # by type
        self._increment_version = self.torch.autograd.graph.increment_version

    def signature(self, x: Array) -> tuple:
        try:
            plain = self._is_plain.get(type(x)) or self._kind_is_plain(type(x))
            return (x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg(), plain)
        except RuntimeError:  # no strides: sparse, nested; the checks of `view` refuse it
            return (x.layout, x.dtype)

    def view(self, x: Array) -> View:
        """A tensor that is more than strided numbers has a dtype that says so: none takes it."""
        dtype = str(x.dtype).removeprefix("torch.")
        device = x.get_device() if x.is_cuda else -1 if x.is_cpu else str(x.device)
        if x.layout is not self.torch.strided or x.is_nested or x.is_quantized:
            kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            shape = (x.dim(),) if x.is_nested else tuple(x.shape)
            return View(shape, (), f"{kind} {dtype}", device)
        if x.is_neg():
            dtype += " with its negative bit set (use resolve_neg())"
        if not self._kind_is_plain(type(x)):
            dtype += f" in a {type(x).__name__}"
        return View(tuple(x.shape), x.stride(), dtype, device)

    def is_strided(self, x: Array) -> bool:
        return x.layout is self.torch.strided and not x.is_nested

    def on_cpu(self, x: Array) -> bool:
        return not x.is_cuda

    def watched(self, *arrays: Any) -> bool:
        """Whether something around the call changes it: autocast or what `traced` names."""
        return self.is_autocast() or self.traced(*arrays)

    def traced(self, *arrays: Any) -> bool:
        """Whether torch has to see the call: a dispatch mode, a first array without memory, or what
        `replaced` names; torch.compile apart. Costs 0.2 µs and 0.05 µs for each array.

        Raises:
            NotImplementedError: forward-mode derivatives of an array are wanted.
        """
        self.refuse_tangents(*arrays)
        return self._modes() > 0 or arrays[0].is_meta or self.replaced(*arrays)

    def replaced(self, *arrays: Any) -> bool:
        """Whether a transform of torch.func, torch.jit.trace or a tensor subclass stands for what a
        kernel would compute with. None and arrays of other libraries count for nothing.
        """
        is_plain = self._is_plain
        for x in arrays:
            if not (is_plain.get(type(x)) or self._kind_is_plain(type(x))):
                return True
        return self._transforms_active() or self._tracer() is not None

    def _kind_is_plain(self, kind: type) -> bool:
        if kind not in self._is_plain:
            plain = getattr(kind, "__torch_dispatch__", self._plain) is self._plain
            self._is_plain[kind] = plain or not issubclass(kind, self.torch.Tensor)
        return self._is_plain[kind]

    def refuse_tangents(self, *arrays: Any) -> None:
        """Raises NotImplementedError where forward-mode derivatives of an array are wanted."""
        if self._forward_mode._current_level < 0:
            return
        for x in arrays:
            if isinstance(x, self.torch.Tensor) and self._has_tangent(x):
                fact = "forward-mode derivatives are not built, allowed are those of backward"
                raise NotImplementedError(f"cupyflash: {fact}, got a dual tensor")

    def _has_tangent(self, x: Array) -> bool:
        try:
            return self._forward_mode.unpack_dual(x).tangent is not None
        except RuntimeError:  # within what torch.compile runs it may not be asked
            return True

    def wants_gradient(self, *arrays: Array | None) -> bool:
        """Of either mode: a derivative that a result without one would lose.

        None and arrays of other libraries count for nothing.
        """
        for x in arrays:
            if x is not None and getattr(x, "requires_grad", False) is True:
                return self.torch.is_grad_enabled()
        if self._forward_mode._current_level < 0:
            return False
        return any(self._has_tangent(x) for x in arrays if isinstance(x, self.torch.Tensor))

    def determinism(self) -> str:
        """What torch.use_deterministic_algorithms asks for: "error", "warn" or ""."""
        if not self.torch.are_deterministic_algorithms_enabled():
            return ""
        warn = self.torch.is_deterministic_algorithms_warn_only_enabled()
        return "warn" if warn else "error"

    def followed(self, *arrays: Array) -> bool:
        """Whether `what_follows` may find something in tensors on a GPU; 1 µs for six of them."""
        is_plain = self._is_plain
        for x in arrays:
            if x.requires_grad or not is_plain.get(type(x)):
                return True
        return (
            self._transforms_active()
            or self._modes() > 0
            or self._tracer() is not None
            or self._forward_mode._current_level >= 0
        )

    def what_follows(self, *arrays: Array, gradients: bool = True) -> str:
        """What of torch follows these, so that no kernel may take them as plain memory; or ""."""
        if self._transforms_active() or self._modes() > 0 or self._tracer() is not None:
            return "a call within a transform of torch.func, torch.jit.trace or a dispatch mode"
        for x in arrays:
            if not self._kind_is_plain(type(x)):
                return f"a {type(x).__name__}"
            if x.is_meta:
                return "a tensor on the device 'meta'"
        if self._forward_mode._current_level >= 0 and any(map(self._has_tangent, arrays)):
            return "a tensor with a forward-mode tangent"
        if gradients and self.wants_gradient(*arrays):
            return "inputs that require a gradient (use torch.no_grad())"
        return ""

    def wrote(self, *arrays: Array) -> None:
        """Tell autograd that a kernel changed these, as an operation of torch in place does."""
        changed = [x for x in arrays if not x.is_inference()]
        try:
            self._increment_version(changed)
        except TypeError:  # a torch that takes one at a time
            for x in changed:
                self._increment_version(x)

    def owner(self, x: Array) -> Any:
        """The object that owns the memory of x, for weak references."""
        return x.untyped_storage()

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
        if strides is None:
            strides = self.strides_of_empty(x.shape, self.view(like))
        return self.empty(x.shape, strides, like).copy_(result)

    def pointer(self, x: Array) -> int:
        """0 for what the checks of a plan refuse; none is ever launched with it.

        Raises:
            NotImplementedError: a tensor of a transform of torch.func, or a lazy zero of autograd.
        """
        try:
            pointer = x.data_ptr()
        except RuntimeError:
            pointer = 0
        if not pointer:
            self._require_memory(x)
        return pointer

    def _require_memory(self, x: Array) -> None:
        refused_later = x.is_meta or not self._kind_is_plain(type(x))
        if x.layout is self.torch.strided and not refused_later and x.numel():
            fact = "tensors must have memory of their own"
            raise NotImplementedError(f"cupyflash: {fact}, got one of torch.func or a lazy zero")

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

    def with_columns(self, columns: int, x: Array) -> Array:
        """A copy with so many numbers on the last axis, zeros behind those of x; no gradient."""
        shape, end = (*x.shape[:-1], columns), x.shape[-1]
        result = self.empty(shape, self.strides_of_empty(shape, self.view(x)), x)
        result[..., end:].zero_()
        result[..., :end].copy_(x.detach())
        return result

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

    def arange(self, count: int, like: Array) -> Array:
        return self.torch.arange(count, dtype=self.torch.int32, device=like.device)

    def reshape(self, shape: tuple[int, ...], x: Array) -> Array:
        return x.reshape(shape)

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
    """Of NumPy and CuPy no subclasses: what those add to the numbers, a mask say, would be lost."""
    for module, names, adapter in (
        ("numpy", ("ndarray", "memmap"), NumpyLibrary),
        ("cupy", ("ndarray",), CupyLibrary),
    ):
        kinds = [getattr(sys.modules.get(module), name, None) for name in names]
        if type(x) in kinds:
            return _libraries.setdefault(kinds[0], adapter())
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None and isinstance(x, tensor):
        return _libraries.setdefault(tensor, TorchLibrary())  # also of its subclasses
    return None


def from_foreign(function: str, x: Array, name: str = "arrays") -> Array:
    """An array of another library as a NumPy or CuPy array on the same memory.

    Raises:
        TypeError: it is None, a subclass of NumPy's or CuPy's arrays, or speaks neither DLPack nor
            ``__cuda_array_interface__``.
        NotImplementedError: its library would want a gradient.
    """
    kind = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}".removeprefix("builtins.")
    for base in (numpy.ndarray, getattr(sys.modules.get("cupy"), "ndarray", numpy.ndarray)):
        if isinstance(x, base):
            fact = f"{name} must be plain arrays, as masks, units and the like would be lost"
            raise TypeError(f"{function}: {fact}, got {kind}")
    if getattr(x, "requires_grad", False) is True or getattr(x, "stop_gradient", True) is False:
        fact = f"{name} of libraries other than torch have no gradients"
        raise NotImplementedError(f"{function}: {fact}, got a {kind} that requires one")
    if isinstance(x, type):  # which has the attributes of its arrays
        kind = f"the class {x.__name__}"
    elif hasattr(x, "__dlpack_device__") and hasattr(x, "__dlpack__"):
        if int(x.__dlpack_device__()[0]) == 1:  # kDLCPU
            try:
                return numpy.from_dlpack(x)
            except RuntimeError:  # a dtype that is none of NumPy's own, as bfloat16
                return numpy.asarray(x)
        import cupy

        return cupy.from_dlpack(x)
    elif hasattr(x, "__cuda_array_interface__"):
        import cupy

        return cupy.asarray(x)
    raise TypeError(
        f"{function}: {name} must be NumPy, CuPy or torch arrays, or speak DLPack or "
        f"__cuda_array_interface__, got {kind}"
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


def device_name(device: int | str) -> str:
    """Of `View.device`, for messages."""
    return "CPU" if device == -1 else str(device)


def compiling() -> bool:
    """Whether torch.compile traces the caller: it could not trace what follows; 0.2 µs."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def array_namespace(array: Any) -> Any:
    """The module whose functions work on ``array``: NumPy, or CuPy for a CuPy array."""
    if type(array).__module__.partition(".")[0] == "cupy":
        import cupy

        return cupy
    import numpy

    return numpy


def compute_dtype(array: Any) -> str:
    """The dtype of sums over a NumPy or CuPy array: float64 of its own kind, else float32."""
    return "float64" if array.dtype == "float64" else "float32"
