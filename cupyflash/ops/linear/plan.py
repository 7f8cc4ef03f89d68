"""A call of a projection: from arrays to the plan that calls of one signature share."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from ... import environment
from ...runtime.array import Array, View, dense_strides
from ...runtime.launch import Launch, copies_were_made
from ...runtime.operation import Plan, Plans
from ...runtime.rows import collapse
from . import reference
from .checks import check
from .launches import launches_of
from .options import Arrays, Options

Step = tuple[Launch, tuple[str, ...]]  # a kernel and the names of its arguments

_plans = Plans(wide=len(Arrays._fields))


def run(
    function: str, library: Any, given: Sequence[Array | None], options: Options
) -> tuple[Array]:
    """One projection, or the two of an MLP, on the arrays of `Arrays`, all of one library."""
    if library.on_cpu(given[0]):
        check(function, library, given, options)
        arrays = Arrays(*(None if y is None else library.to_numpy(y) for y in given))
        out = reference.project(arrays, options)
        return (library.from_numpy(out, given[0], dense_strides(out.shape, range(out.ndim))),)
    settings = environment.current()
    # The function is in the key because mlp alone must have a second weight.
    key, pointers = _plans.key(library, given, (function, options, settings.backend))
    plan = _plans.get(key)
    if plan is None or settings.debug:
        views = check(function, library, given, options)
        plan = LinearPlan(function, library, views, options, key[-1], settings.backend)
        _plans.add(key, plan)
    return (plan(given, pointers),)


# The arguments of kernels by name: fields of `Arrays`, "out" for the result, "hidden" and "normal"
# for memory between two kernels, "" for null. They are in the order of LinearParams for a
# projection, of NormFwdParams for a norm.
ONLY = (*Arrays._fields[: Arrays._fields.index("positions") + 1], "out")
FIRST = tuple({"residual": "", "out": "hidden"}.get(name, name) for name in ONLY)
SECOND = ("hidden", "down_weight", "", "down_bias", "", "residual", *[""] * 5, "out")
NORM = ("x", "", "norm_weight", "norm_bias", "normal", "", "")
AFTER_NORM = {"x": "normal", "norm_weight": "", "norm_bias": ""}
# Arrays that may be float32 beside an x of 16 bits.
ROUNDED = ("weight", "gate_weight", "bias", "gate_bias", "down_weight", "down_bias")


class LinearPlan(Plan):
    """The kernels for one signature: one projection, or the two of an MLP.

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
        x, last = views["x"], views.get("down_weight", views["weight"])
        super().__init__(x.device)
        self.library = library
        self.shape = (*x.shape[:-1], last.shape[0])
        self.strides = dense_strides(self.shape, range(len(self.shape)))
        self.empty = 0 in x.shape
        if self.empty:
            return
        self._prepare(views)
        self.between = {}
        if "down_weight" in views:
            steps = self._mlp(function, views, options, aligned, backend)
        else:
            seqlen = x.shape[-2] if len(x.shape) > 1 else 1
            steps = self._projection(ONLY, function, views, options, aligned, backend, seqlen)
        self.steps = [(launch, self._places(names)) for launch, names in steps]

    def _prepare(self, views: dict[str, View]) -> None:
        """Decide which arrays each call copies and which it rounds; the views are of the copies."""
        x, place = views["x"], Arrays._fields.index
        self.copied, self.rounded = [], []
        for name in ("x", "residual"):
            if name in views:
                views[name], is_copy = as_rows(views[name])
                self.copied += [place(name)] * is_copy
        if "positions" in views:  # a copy only where they are not contiguous
            self.copied.append(place("positions"))
        for name in ROUNDED:
            if name in views and views[name].dtype != x.dtype:
                self.rounded.append(place(name))
                views[name] = dense(views[name].shape, x)

    def _projection(
        self, names: tuple[str, ...], function: str, views: dict[str, View], *how: Any
    ) -> list[Step]:
        """The kernels of a projection, and of the norm before it if that is one of its own."""
        norm, launches = launches_of(function, views, *how)
        if norm is None:
            return [(launch, names) for launch in launches]
        self.between["normal"] = views["x"].shape
        names = tuple(AFTER_NORM.get(name, name) for name in names)
        return [(norm, NORM), *((launch, names) for launch in launches)]

    def _mlp(
        self, function: str, views: dict[str, View], options: Options, *how: Any
    ) -> list[Step]:
        """The kernels of both projections."""
        hidden = views["x"].shape[0], views["weight"].shape[0]
        arrays = Arrays(*map(views.get, Arrays._fields))
        first, second = (
            {name: view for name, view in each._asdict().items() if view is not None}
            for each in (arrays.first(), arrays.second(dense(hidden, views["x"])))
        )
        self.between["hidden"] = hidden
        return [
            *self._projection(FIRST, function, first, options, *how),
            *self._projection(SECOND, function, second, Options(), *how),
        ]

    def _places(self, names: tuple[str, ...]) -> Callable[[Sequence[int]], tuple[int, ...]]:
        """A function that picks the pointers of these names out of all that `run` has."""
        order = (*Arrays._fields, "out", "", *self.between)
        return operator.itemgetter(*map(order.index, names))

    def run(self, given: Sequence[Array | None], pointers: list[int]) -> Array:
        """Launch for arrays of `Arrays`, which have these pointers."""
        library, pointer, x = self.library, self.library.pointer, given[0]
        out = library.empty(self.shape, self.strides, x)
        if self.empty:
            return out
        pointers, copies = [*pointers, pointer(out), 0], {}  # copies live until the launch
        if self.copied or self.rounded:
            copies_were_made()
            copies = {i: library.contiguous(given[i]) for i in self.copied}
            for i in self.rounded:
                copies[i] = library.contiguous(library.cast(given[i], x))
            for i, copy in copies.items():
                pointers[i] = pointer(copy)
        stream = library.stream(self.device_id)
        between = [library.empty(shape, (shape[1], 1), x) for shape in self.between.values()]
        pointers += map(pointer, between)
        for launch, arguments in self.steps:
            launch.start(stream, launch.argument(*arguments(pointers)))
        return out


def as_rows(x: View) -> tuple[View, bool]:
    """An array seen as (rows, columns), and whether it must be copied for that."""
    columns = x.shape[-1]
    sizes, (steps,) = collapse(x.shape[:-1], [x.strides[:-1]])
    if len(sizes) > 1:
        return dense((math.prod(x.shape[:-1]), columns), x), True
    return View((sizes[0], columns), (steps[0] if sizes[0] > 1 else columns, 1), *x[2:]), False


def dense(shape: tuple[int, ...], like: View) -> View:
    """A contiguous array with the dtype and device of another."""
    return View(shape, dense_strides(shape, range(len(shape))), like.dtype, like.device)
