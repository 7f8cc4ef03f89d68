"""Calls with arrays that no kernel takes as they are: the same call on copies of them.

Which copies a call needs depends on its signature alone.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..runtime.array import Array, View, dense_strides
from ..runtime.launch import copies_were_made
from ..runtime.operation import Plan
from ..runtime.rows import collapse
from ..runtime.structs import header

structs = header("norm/params.cuh")

Strides = tuple[int, ...]


class Detour(Plan):
    """A plan that makes copies and then the call that it stands for, in ``call``."""

    def __init__(self, library: Any, device: int, call: Callable[..., tuple]) -> None:
        super().__init__(device)
        torch = sys.modules.get("torch")
        self.call = torch.no_grad()(call) if library.name == "torch.Tensor" else call

    def run(self, *arrays: Any) -> tuple:
        copies_were_made()
        return self.call(*arrays)


def result_strides(library: Any, x: View) -> Strides:
    """Strides of a result like x: dense, in the order of its axes if kernels can address that."""
    strides = library.strides_of_empty(x.shape, x)
    if len(x.shape) - 1 <= structs.ROW_AXES or 0 in x.shape:
        return strides
    sizes, _ = collapse(x.shape[:-1], [strides[:-1]])
    return (
        strides if len(sizes) <= structs.ROW_AXES else dense_strides(x.shape, range(len(x.shape)))
    )


def rows_to_copy(strides: Strides, views: Mapping[str, View], names: Iterable[str]) -> set[str]:
    """Which of the arrays no kernel addresses beside a result of these strides."""
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


def dense(library: Any, x: Array, strides: Strides, like: Array) -> Array:
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
