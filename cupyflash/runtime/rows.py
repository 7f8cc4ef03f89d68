"""Rows of tensors of any strides, as a kernel can address them, and copies of those that it cannot.

`Detour` stands for a call with arrays that no kernel takes as they are: it makes the same call on
copies. Which copies a call needs depends on its signature alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import loaded
from .array import Array, View, dense_strides
from .config import ITEM_SIZE
from .launch import copies_were_made
from .operation import Plan
from .structs import header

structs = header("norm/params.cuh")


class Rows:
    """The rows of tensors of one shape, with axes collapsed where the strides of all allow it.

    Attributes:
        strides: ``<name>_strides`` of each tensor, for the parameter structs.
        aligned: whether the distances and the lengths of all rows are multiples of 16 bytes.

    Raises:
        ValueError: more than ``ROW_AXES`` axes are left.
    """

    def __init__(self, function: str, tensors: Mapping[str, View]) -> None:
        x = tensors["x"]
        *sizes, self.columns = x.shape
        self.sizes, steps = collapse(sizes, [y.strides[:-1] for y in tensors.values()])
        if len(self.sizes) > structs.ROW_AXES:
            got = {name: y.strides for name, y in tensors.items()}
            fact = (
                f"the strides must let all dimensions but the last collapse into {structs.ROW_AXES}"
            )
            raise ValueError(f"{function}: {fact}, got shape {x.shape}, strides {got}")
        self.rows = math.prod(self.sizes)
        self.strides = {
            f"{name}_strides": structs.RowStrides((*axes, *[0] * (structs.ROW_AXES - len(axes))))
            for name, axes in zip(tensors, steps)
        }
        item = ITEM_SIZE[x.dtype]
        lengths = (self.columns, *(step for axes in steps for step in axes))
        self.aligned = all(length * item % 16 == 0 for length in lengths)

    def shape(self, eps: float) -> structs.NormShape:
        """The shape as the kernels take it."""
        sizes = (*self.sizes, *[1] * (structs.ROW_AXES - len(self.sizes)))
        return structs.NormShape(
            self.rows, sizes, len(self.sizes), self.columns, 1 / self.columns, eps
        )


def collapse(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """The fewest axes, but at least one, that address all elements of several tensors of one shape.

    Args:
        sizes: sizes of the axes, none of them 0.
        strides: the strides of each tensor.

    Returns:
        The sizes, and the strides of each tensor.
    """
    kept: list[tuple[int, list[int]]] = []
    for size, *steps in zip(sizes, *strides):
        if size == 1:
            continue
        if kept and all(outer == size * step for outer, step in zip(kept[-1][1], steps)):
            size *= kept.pop()[0]
        kept.append((size, steps))
    if not kept:
        return [1], [[0] for _ in strides]
    return [size for size, _ in kept], [list(steps) for steps in zip(*(s for _, s in kept))]


def is_contiguous(x: View, last: int | None = None) -> bool:
    """Whether the elements, or those of so many last dimensions, are contiguous in C order."""
    step, count = 1, len(x.shape) if last is None else min(last, len(x.shape))
    for size, stride, _ in zip(reversed(x.shape), reversed(x.strides), range(count)):
        if size > 1 and stride != step:
            return 0 in x.shape
        step *= size
    return True


def dense_like(x: View) -> tuple[int, ...]:
    """Strides of a dense tensor with the order of axes of x; those of length 1 do not matter."""
    axes = range(len(x.shape))
    order = sorted(axes, key=lambda axis: -x.strides[axis] if x.shape[axis] > 1 else -math.inf)
    return dense_strides(x.shape, order)


class Detour(Plan):
    """A plan that makes copies and then the call that it stands for, in ``call``."""

    def __init__(self, library: Any, device: int, call: Callable[..., tuple]) -> None:
        super().__init__(device)
        self.call = loaded.torch.no_grad()(call) if library.has_autograd else call

    def run(self, *arrays: Any) -> tuple:
        copies_were_made()
        return self.call(*arrays)


def result_strides(library: Any, x: View) -> tuple[int, ...]:
    """Strides of a result like x: dense, in the order of its axes if kernels can address that."""
    strides = library.strides_of_empty(x.shape, x)
    if len(x.shape) - 1 <= structs.ROW_AXES or 0 in x.shape:
        return strides
    sizes, _ = collapse(x.shape[:-1], [strides[:-1]])
    return (
        strides if len(sizes) <= structs.ROW_AXES else dense_strides(x.shape, range(len(x.shape)))
    )


def rows_to_copy(
    strides: tuple[int, ...], views: Mapping[str, View], names: Iterable[str]
) -> set[str]:
    """The names of arrays that no kernel addresses beside a result of these strides."""
    given = {name: views[name] for name in names if name in views}
    shape = views["x"].shape
    if 0 in shape:
        return set()
    found = {name for name, y in given.items() if shape[-1] > 1 and y.strides[-1] != 1}
    kept = [y.strides[:-1] for name, y in given.items() if name not in found]
    sizes, _ = collapse(shape[:-1], [strides[:-1], *kept])
    if len(sizes) > structs.ROW_AXES:
        found |= {name for name, y in given.items() if y.strides != strides}
    return found


def dense(library: Any, x: Array, strides: tuple[int, ...], like: Array) -> Array:
    """A copy of x with these strides, in the dtype of ``like``."""
    shape = tuple(x.shape)
    result = library.empty_strided(shape, strides, like)
    result[...] = x
    return result


def filled(library: Any, size: int, value: float, like: Array) -> Array:
    """(size,) of one value on the device of ``like``, float32: a weight beside x of any dtype."""
    result = library.empty_float32((size,), like)
    library.fill(result, value)
    return result
