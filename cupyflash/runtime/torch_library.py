"""The adapter of torch, which reads tensors and allocates results."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from .array import SEEDS, Array, Empty, View, dense_strides
from .torch_tracking import TorchTracking


class TorchLibrary(TorchTracking):
    """torch tensors, on a GPU or on the CPU."""

    name = "torch.Tensor"

    def __init__(self) -> None:
        super().__init__()
        # 0.1 µs instead of the 4 µs of torch.cuda.current_stream(); Triton relies on it too.
        self._raw_stream = getattr(self.torch._C, "_cuda_getCurrentRawStream", None)
        self._increment_version = self.torch.autograd.graph.increment_version

    def signature(self, x: Array) -> tuple:
        try:
            plain = self._is_plain.get(type(x)) or self._kind_is_plain(type(x))
            return (x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg(), plain)
        except RuntimeError:  # sparse and nested tensors have no strides; the checks refuse them
            return (x.layout, x.dtype)

    def read(self, arrays: Sequence[Array | None]) -> tuple[list[tuple | None], list[int]]:
        is_plain = self._is_plain
        signatures: list[tuple | None] = []
        pointers: list[int] = []
        try:
            for x in arrays:  # without the calls of `signature` and `pointer`: 1 µs for three
                if x is None:
                    signatures.append(None)
                    pointers.append(0)
                    continue
                plain = is_plain.get(type(x)) or self._kind_is_plain(type(x))
                signatures.append((x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg(), plain))
                pointers.append(x.data_ptr() or self.pointer(x))
        except RuntimeError:  # no strides or no memory
            return super().read(arrays)
        return signatures, pointers

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
        return x if x.is_contiguous() else x.contiguous()  # without the dispatcher, if it can be

    def copy(self, x: Array) -> Array:
        return x.clone()

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], like: Array) -> Array:
        """Uninitialised, with dtype and device of ``like``."""
        if like.stride() == strides and like.shape == shape:
            return self.torch.empty_like(like)  # the same result in half the time
        return self.torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)

    empty_strided = empty

    def allocator(self, *results: Empty) -> Callable[[Array], tuple[list[Array], list[int]]]:
        general, on_gpu = super().allocator(*results), self.gpu_allocator()
        device = results[0].like.device
        if on_gpu is None or not isinstance(device, int) or device < 0:
            return general
        wanted = [
            (
                tuple(map(int, x.shape)),
                tuple(map(int, x.strides)),
                getattr(self.torch, "float32" if x.float32 else x.like.dtype),
            )
            for x in results
        ]

        def allocate(like: Array) -> tuple[list[Array], list[int]]:
            made, pointers = [], []
            for shape, strides, dtype in wanted:
                x = on_gpu(shape, strides, dtype)
                made.append(x)
                pointers.append(x.data_ptr())
            # torch's current GPU may be another one than CUDA's, which is that of the plan.
            return (made, pointers) if x.get_device() == like.get_device() else general(like)

        return allocate

    def gpu_allocator(self) -> Callable[..., Array] | None:
        """What Inductor's code allocates with on torch's current GPU, or None.

        It goes around the dispatcher, in a third of the time of ``torch.empty``. Its name is
        private: torch 2.7 to 2.14 has it.
        """
        guards = getattr(self.torch._C._dynamo, "guards", None)
        return getattr(guards, "_empty_strided_cuda", None)

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


class RawStream(NamedTuple):
    """A stream of another library, in the form that CuPy's launch takes."""

    ptr: int


@functools.lru_cache(maxsize=256)
def raw_stream(pointer: int) -> RawStream:
    return RawStream(pointer)
