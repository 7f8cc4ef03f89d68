"""The adapter of torch, which reads tensors, allocates results, and sees what torch does around."""

import functools
from typing import Any, NamedTuple

import numpy

from . import loaded
from .array import SEEDS, Array, View, dense_strides
from .libraries import Library


class TorchLibrary(Library):
    """torch tensors, on a GPU or on the CPU."""

    name = "torch.Tensor"
    has_autograd = True

    def __init__(self) -> None:
        self.torch = loaded.torch
        # 0.1 µs instead of the 4 µs of torch.cuda.current_stream(); Triton relies on it too.
        self._raw_stream = getattr(self.torch._C, "_cuda_getCurrentRawStream", None)
        self._transforms_active = self.torch._C._are_functorch_transforms_active
        self._modes = self.torch._C._len_torch_dispatch_stack
        self._tracer = self.torch._C._get_tracing_state
        self.is_autocast = self.torch._C._is_any_autocast_enabled
        self._forward_mode = self.torch.autograd.forward_ad
        self._plain = self.torch.Tensor.__torch_dispatch__  # only tensor subclasses have another
        self._is_plain = {self.torch.Tensor: True}  # keys: types
        self._increment_version = self.torch.autograd.graph.increment_version

    def signature(self, x: Array) -> tuple:
        try:
            plain = self._is_plain.get(type(x)) or self._kind_is_plain(type(x))
            return (x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg(), plain)
        except RuntimeError:  # sparse and nested tensors have no strides; the checks refuse them
            return (x.layout, x.dtype)

    def view(self, x: Array) -> View:
        """The view. If a tensor is more than strided numbers, its dtype is one that all refuse."""
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

    def route(self, first: Array, arrays: tuple) -> str:
        """The method of a `TorchSide` that takes a call of these arrays, or ""; 0.8 µs for three.

        It is "traced" as `traced` says, and "called" under autocast and where an array requires a
        gradient. None and arrays of other libraries are ignored.

        Raises:
            NotImplementedError: an array has a forward-mode tangent.
        """
        if self._forward_mode._current_level >= 0:
            self.refuse_tangents(*arrays)
        is_plain, wanted = self._is_plain, False
        for x in arrays:
            kind = type(x)
            if not (is_plain.get(kind) or self._kind_is_plain(kind)):
                return "traced"
            if x is not None and getattr(x, "requires_grad", False) is True:
                wanted = True
        if (
            self._modes() > 0
            or first.is_meta
            or self._transforms_active()
            or self._tracer() is not None
        ):
            return "traced"
        return "called" if self.is_autocast() or (wanted and self.torch.is_grad_enabled()) else ""

    def traced(self, *arrays: Any) -> bool:
        """Whether torch must see the call as an operator.

        It must under a dispatch mode, if the first array is a meta tensor, and in the cases of
        `replaced`; `compiling` covers torch.compile. Costs 0.2 µs and 0.05 µs for each array.

        Raises:
            NotImplementedError: an array has a forward-mode tangent.
        """
        self.refuse_tangents(*arrays)
        return self._modes() > 0 or arrays[0].is_meta or self.replaced(*arrays)

    def replaced(self, *arrays: Any) -> bool:
        """Whether a transform of torch.func, torch.jit.trace or a tensor subclass is involved.

        Their tensors are stand-ins for the numbers that a kernel needs. None and arrays of other
        libraries do not count.
        """
        is_plain = self._is_plain
        for x in arrays:
            if not (is_plain.get(type(x)) or self._kind_is_plain(type(x))):
                return True
        return self._transforms_active() or self._tracer() is not None

    def _kind_is_plain(self, kind: type) -> bool:
        if kind not in self._is_plain:
            refuse_sharded(kind)
            plain = getattr(kind, "__torch_dispatch__", self._plain) is self._plain
            plain = plain and kind.__module__ != "torch.nn.attention.bias"  # memory with no numbers
            self._is_plain[kind] = plain or not issubclass(kind, self.torch.Tensor)
        return self._is_plain[kind]

    def refuse_tangents(self, *arrays: Any) -> None:
        """Raises NotImplementedError if an array has a forward-mode tangent."""
        if self._forward_mode._current_level < 0:
            return
        for x in arrays:
            if isinstance(x, self.torch.Tensor) and self._has_tangent(x):
                fact = "forward-mode derivatives are not built, allowed are those of backward"
                raise NotImplementedError(f"cupyflash: {fact}, got a dual tensor")

    def _has_tangent(self, x: Array) -> bool:
        try:
            return self._forward_mode.unpack_dual(x).tangent is not None
        except RuntimeError:  # inside of code that torch.compile runs, torch does not answer
            return True

    def wants_gradient(self, *arrays: Array | None) -> bool:
        """Whether a derivative, of backward or forward mode, would be lost in a plain result.

        None and arrays of other libraries do not count.
        """
        for x in arrays:
            if x is not None and getattr(x, "requires_grad", False) is True:
                return self.torch.is_grad_enabled()
        if self._forward_mode._current_level < 0:
            return False
        return any(self._has_tangent(x) for x in arrays if isinstance(x, self.torch.Tensor))

    def determinism(self) -> str:
        """The setting of torch.use_deterministic_algorithms: "error", "warn" or ""."""
        if not self.torch.are_deterministic_algorithms_enabled():
            return ""
        warn = self.torch.is_deterministic_algorithms_warn_only_enabled()
        return "warn" if warn else "error"

    def followed(self, *arrays: Array) -> bool:
        """Whether `what_follows` may return something for tensors on a GPU; 1 µs for six."""
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
        """The name of what tracks these, so that no kernel may take them; "" for nothing."""
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
        """Tells autograd that a kernel has changed these, as an in-place operation does."""
        changed = [x for x in arrays if not x.is_inference()]
        try:
            self._increment_version(changed)
        except TypeError:  # an older torch takes one tensor at a time
            for x in changed:
                self._increment_version(x)

    def owner(self, x: Array) -> Any:
        """The object that owns the memory of x, for weak references."""
        return x.untyped_storage()

    def to_numpy(self, x: Array) -> numpy.ndarray:
        """A view, or for bfloat16, which NumPy does not have, a copy in float32."""
        x = x.detach()
        return (x.float() if x.dtype == self.torch.bfloat16 else x).numpy()

    def from_numpy(
        self,
        x: numpy.ndarray,
        like: Array | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> Array:
        """A tensor in the dtype of ``like``, with the strides that a result on a GPU would have."""
        result = self.torch.from_numpy(x)
        if like is None:
            return result
        if strides is None:
            strides = self.strides_of_empty(x.shape, self.view(like))
        return self.empty(x.shape, strides, like).copy_(result)

    def pointer(self, x: Array) -> int:
        """The address, or 0 for a tensor that the checks of a plan refuse before a launch.

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

    def copy(self, x: Array) -> Array:
        return x.clone()

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], like: Array) -> Array:
        """Uninitialised, with dtype and device of ``like``."""
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
        """An int64 tensor of one element; it is filled, since a copy from the host would wait."""
        return self.torch.full((1,), value, dtype=self.torch.int64, device=like.device)

    def random_seed(self, like: Array) -> Array:
        """An int64 tensor of one element, from torch's generator of the device of ``like``."""
        return self.torch.randint(SEEDS, (1,), dtype=self.torch.int64, device=like.device)

    def with_columns(self, columns: int, x: Array) -> Array:
        """A copy whose last axis has this number of columns, zeros after those of x."""
        shape, end = (*x.shape[:-1], columns), x.shape[-1]
        result = self.empty(shape, self.strides_of_empty(shape, self.view(x)), x)
        result[..., end:].zero_()
        result[..., :end].copy_(x.detach())
        return result

    def strides_of_empty(self, shape: tuple[int, ...], like: View) -> tuple[int, ...]:
        """Dense strides in the axis order of ``like``: a transposed q gives a transposed out.

        The last axis stays the innermost one, even if another axis is expanded (stride 0).
        """
        last = len(shape) - 1
        order = sorted(range(last), key=lambda axis: -like.strides[axis])
        return dense_strides(shape, [*order, last])

    def stream(self, device: int) -> "RawStream":
        if self._raw_stream is not None:
            return raw_stream(self._raw_stream(device))
        return raw_stream(self.torch.cuda.current_stream(device).cuda_stream)

    def arange(self, count: int, like: Array) -> Array:
        return self.torch.arange(count, dtype=self.torch.int32, device=like.device)

    def device(self, x: Array) -> int:
        return x.get_device()

    def put(self, x: numpy.ndarray, like: Array) -> Array:
        """A NumPy array on the device of ``like``; ready for every stream, as ``to`` waits.

        It may be kept, so it is no inference tensor, even in a call under inference mode.
        """
        with self.torch.inference_mode(False):
            return self.torch.from_numpy(x).to(like.device)


def refuse_sharded(kind: type) -> None:
    """Raises NotImplementedError if a type is DTensor: the operators have no sharding rule."""
    if kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed"):
        fact = "no function has a rule for sharded tensors"
        allowed = "allowed are their local parts (torch.distributed.tensor.experimental.local_map)"
        raise NotImplementedError(f"cupyflash: {fact}, {allowed}, got a DTensor")


class RawStream(NamedTuple):
    """A stream of another library, in the form that CuPy's launch takes."""

    ptr: int


@functools.lru_cache(maxsize=256)
def raw_stream(pointer: int) -> RawStream:
    return RawStream(pointer)
