"""Projections: what calls of one signature share, and how they run."""

import math
from collections.abc import Sequence
from typing import Any

from ..runtime.array import Array, View, dense_strides
from ..runtime.launch import copies_were_made
from ..runtime.operation import Plan
from ..runtime.rows import collapse
from .few_sm90_kernels import LinearFewSm90
from .mlp_launch import few_mlp
from .projection import Projection, few_kernel
from .reference import Arrays, Options

ARRAYS = len(Arrays._fields)
X, POSITIONS, DOWN_RESIDUAL = 0, ARRAYS - 1, ARRAYS + 2
RESIDUAL = Arrays._fields.index("residual")
WEIGHTS = {  # which may be float32 beside an x of 16 bits
    **{Arrays._fields.index(x): x for x in ("weight", "gate_weight", "bias", "gate_bias")},
    **{ARRAYS: "down_weight", ARRAYS + 1: "down_bias"},
}


class LinearPlan(Plan):
    """The kernels for one signature: one projection, or two, or a whole MLP at once.

    Rows of x that lie in no single stride are copied side by side first; so are residuals. float32
    weights and biases beside an x of 16 bits are rounded to its dtype first.
    """

    def __init__(
        self,
        function: str,
        library: Any,
        views: dict[str, View],
        options: Options,
        aligned: bool,
        backend: str | None,
    ) -> None:
        x = views["x"]
        super().__init__(x.device)
        self.library = library
        last = "down_weight" if "down_weight" in views else "weight"
        self.shape = (*x.shape[:-1], views[last].shape[0])
        self.strides = dense_strides(self.shape, range(len(self.shape)))
        self.empty = 0 in x.shape
        if self.empty:
            return
        self.copied = []
        names = {X: "x", RESIDUAL: "residual", DOWN_RESIDUAL: "down_residual"}
        for index, name in names.items():
            if name in views:
                views[name], copied = as_rows(views[name])
                self.copied += [index] * copied
        self.rounded = []
        for index, name in WEIGHTS.items():
            if name in views and views[name].dtype != x.dtype:
                self.rounded.append(index)
                views[name] = dense(views[name].shape, x)
        self.mlp = self.down = None
        first = {name: view for name, view in views.items() if not name.startswith("down")}
        few = few_kernel(first, options, aligned, backend)
        if "down_weight" in views:
            second = {name.removeprefix("down_"): views[name] for name in views if "down" in name}
            self.hidden_shape = (views["x"].shape[0], views["weight"].shape[0])
            second["x"] = dense(self.hidden_shape, x)
            few_down = few_kernel(second, Options(), aligned, backend)
            if not all(isinstance(each, LinearFewSm90) for each in (few, few_down)):
                self.mlp = few_mlp(views, options, aligned, backend)
            if self.mlp is None:
                self.down = Projection(function, second, Options(), few_down, aligned, backend)
        seqlen = x.shape[-2] if len(x.shape) > 1 else 1
        if self.mlp is None:
            self.first = Projection(function, first, options, few, aligned, backend, seqlen)

    def run(self, given: Sequence[Array | None], pointers: tuple[int, ...]) -> Array:
        """``given`` and their pointers as `reference.Arrays`, then those of `Down`."""
        library, pointer, x = self.library, self.library.pointer, given[X]
        out = library.empty(self.shape, self.strides, x)
        if self.empty:
            return out
        stream, kept = library.stream(self.device_id), {}  # copies live until the launch
        positions = given[POSITIONS]
        copied = self.copied
        if positions is not None:
            copied = [*copied, POSITIONS]
        if copied or self.rounded:
            copies_were_made()
            pointers = list(pointers)
            kept = {index: library.contiguous(given[index]) for index in copied}
            for index in self.rounded:
                kept[index] = library.contiguous(library.cast(given[index], x))
            for index, array in kept.items():
                pointers[index] = pointer(array)
        first, second = pointers[:ARRAYS], pointers[ARRAYS:]
        if self.mlp is not None:
            self.mlp.run(library, stream, x, first, second, pointer(out))
        elif self.down is None:
            self.first(library, stream, x, first, pointer(out))
        else:
            rows, columns = self.hidden_shape
            hidden = library.empty((rows, columns), (columns, 1), x)
            self.first(library, stream, x, first, pointer(hidden))
            weight, bias, residual = second
            arguments = (pointer(hidden), weight, 0, bias, 0, residual, 0, 0, 0, 0, 0)
            self.down(library, stream, x, arguments, pointer(out))
        return out


def as_rows(x: View) -> tuple[View, bool]:
    """As (rows, columns), and whether it must be copied for that."""
    columns = x.shape[-1]
    sizes, (steps,) = collapse(x.shape[:-1], [x.strides[:-1]])
    if len(sizes) > 1:
        return dense((math.prod(x.shape[:-1]), columns), x), True
    return View((sizes[0], columns), (steps[0] if sizes[0] > 1 else columns, 1), *x[2:]), False


def dense(shape: tuple[int, ...], like: View) -> View:
    """A contiguous array with the dtype and device of another."""
    return View(shape, dense_strides(shape, range(len(shape))), like.dtype, like.device)
