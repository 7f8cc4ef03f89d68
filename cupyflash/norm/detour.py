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
from .groups import dense_like, layout_of

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


def group_norm_forward(library: Any, views: Mapping[str, View], forward: Callable) -> Detour | None:
    """The detour of `group_norm_dispatch.forward` with (x, weight, bias); None if not needed."""
    x = views["x"]
    gaps, strides = layout_of(x) is None, dense_like(x)
    if "weight" in views and not gaps:
        return None

    def call(x: Array, weight: Array, bias: Array, need_stats: bool) -> tuple:
        if weight is None:
            weight, bias = (filled(library, x.shape[1], value, x) for value in (1.0, 0.0))
        return forward(dense(library, x, strides, x) if gaps else x, weight, bias, need_stats)

    return Detour(library, x.device, call)


def group_norm_backward(
    library: Any, views: Mapping[str, View], backward: Callable
) -> Detour | None:
    """The detour of `group_norm_dispatch.backward` with (dout, x, weight, bias, stats), likewise.

    A gradient in another memory format than x is copied into that of x.
    """
    x, strides = views["x"], dense_like(views["x"])
    layout = layout_of(x) or layout_of(x._replace(strides=strides))
    of_dout = layout_of(views["dout"], layout.channels_last)
    x_gaps = layout_of(x) is None
    dout_gaps = of_dout is None or of_dout.channels_last != layout.channels_last
    if "weight" in views and not (x_gaps or dout_gaps):
        return None

    def call(dout: Array, x: Array, weight: Array, bias: Array, stats: Array) -> tuple:
        if dout_gaps:
            dout = dense(library, dout, strides, x)
        values, scales = dense(library, x, strides, x) if x_gaps else x, (weight, bias)
        if weight is None:
            scales = [filled(library, x.shape[1], value, x) for value in (1.0, 0.0)]
        dx, *sums = backward(dout, values, *scales, stats)
        return (dx, None, None) if weight is None else (dx, *sums)

    return Detour(library, x.device, call)


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
