"""What the package knows of an array of any library: its properties apart from its pointer."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy

from . import loaded

Array = Any


class ArrayLike(Protocol):
    """The type of arrays of any library, for type checkers; lists and numbers are no arrays."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=ArrayLike)  # the type of a caller's arrays, also of the results

SEEDS = 2**63 - 1  # seeds of dropout are drawn from 0 to one less than this


class View(NamedTuple):
    """The properties of an array that the checks and the kernels need, except its pointer."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    device: int | str  # -1: the CPU; the name of a device that is neither CPU nor CUDA


class Empty(NamedTuple):
    """An array that a plan allocates at each call, with the dtype and on the device of ``like``."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    like: View
    float32: bool = False  # instead of that dtype


def allocated(
    library: Any, wanted: tuple[Empty, ...], like: Array
) -> tuple[list[Array], list[int]]:
    """These, allocated by a library on the device of ``like``, and their pointers."""
    made = [
        library.empty_float32(x.shape, like)
        if x.float32
        else library.empty(x.shape, x.strides, like)
        for x in wanted
    ]
    return made, [library.pointer(x) for x in made]


def dense_strides(shape: tuple[int, ...], order: Any) -> tuple[int, ...]:
    """Strides in elements of a dense array whose axes lie in ``order``, the outermost first.

    Sizes may be symbols of torch, of which only torch takes the maximum.
    """
    numbers = all(isinstance(size, int) for size in shape)
    larger = max if numbers else loaded.torch.sym_max
    strides, step = [0] * len(shape), 1
    for axis in reversed(list(order)):
        strides[axis] = step
        step *= larger(1, shape[axis])
    return tuple(strides)


def device_name(device: int | str) -> str:
    """The name of a `View.device` in messages."""
    return "CPU" if device == -1 else str(device)


def compiling() -> bool:
    """Whether torch.compile traces the caller; it cannot trace the checks and launches. 0.2 µs."""
    torch = loaded.torch
    return torch is not None and torch.compiler.is_compiling()


def array_namespace(array: Any) -> Any:
    """The module whose functions work on ``array``: NumPy, or CuPy for a CuPy array."""
    if type(array).__module__.partition(".")[0] == "cupy":
        import cupy

        return cupy

    return numpy


def silent(function: Callable) -> Callable:
    """The function without NumPy's warnings and errors of NaN, infinity and overflow.

    They are results like any others, as in torch and on a GPU.
    """

    # numpy.errstate itself as a decorator is not safe in threads before NumPy 2.
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with numpy.errstate(all="ignore"):
            return function(*arguments, **options)

    return call


def compute_dtype(array: Any) -> str:
    """The dtype for sums over a NumPy or CuPy array: float64 if it is float64, else float32."""
    return "float64" if array.dtype == "float64" else "float32"
