"""Dropout before a norm: h = dropout(x) + residual, by a kernel of its own."""

from collections.abc import Mapping
from typing import Any

from ...runtime.array import Array, View, compiling
from ...runtime.checks import require_grid
from ...runtime.launch import Launch
from ...runtime.operation import Plan, Plans
from ...runtime.philox import (
    dropout_scale,
    dropout_threshold,
    is_number,
    require_probability,
    require_seed_array,
    seed_array,
)
from ...runtime.rows import Detour, Rows, dense, result_strides, rows_to_copy
from . import kernels, reference

_plans = Plans(wide=2)


def split(dropout_p: Any, seed: Any) -> tuple[Array | None, tuple[Any, int | None]]:
    """The seed if it is an array, and (dropout_p, the seed if it is a number)."""
    return (None, (dropout_p, seed)) if is_number(seed) else (seed, (dropout_p, None))


def resolve(
    function: str,
    library: Any,
    x: Array,
    dropout_p: Any,
    number: int | None,
    seed: Array | None,
    *,
    drawn: bool = True,
) -> tuple[float, Array | None]:
    """(dropout_p, the seed as an array beside x), (0, None) where nothing is dropped.

    That array is still to be checked by `require_seed_array`, once for each plan.

    Args:
        number, seed: as `split` returns them; where both are None, a seed is drawn.
        drawn: whether a seed may be drawn; a backward needs that of the forward.

    Raises:
        As `require_probability` and `seed_array`; ValueError without a seed that is needed.
    """
    seed = number if seed is None else seed
    if type(dropout_p) is float:  # as in nearly every call
        if seed is None and not dropout_p:
            return 0.0, None
        if seed is not number and 0 < dropout_p < 1:
            return dropout_p, seed
    dropout_p = require_probability(function, dropout_p)
    if dropout_p and seed is None and not drawn:
        raise ValueError(f"{function}: dropout_p needs the dropout_seed of the forward, got None")
    array = seed_array(function, library, x, seed, dropout_p)
    if not (dropout_p or is_number(seed) or compiling()):  # no plan will see it
        require_seed_array(function, library, x, seed)
    return dropout_p, array


def add(
    function: str, library: Any, x: Array, residual: Array | None, p: float, seed: Array
) -> Array:
    """dropout(x) + residual like the residual, or like x where there is none; of checked arrays.

    Args:
        p: above 0.
        seed: int64 of one element.
    """
    if library.on_cpu(x):
        strides = result_strides(library, library.view(x))
        given = [None if y is None else library.to_numpy(y) for y in (x, residual)]
        h = reference.dropout_add(*given, dropout_threshold(p), int(seed.item()))
        return library.from_numpy(h, x if residual is None else residual, strides)

    key, pointers = _plans.key(library, (x, residual), p)
    plan = _plans.get(key)
    if plan is None:
        given = {"x": x} if residual is None else {"x": x, "residual": residual}
        views = {name: library.view(y) for name, y in given.items()}
        plan = _copying(function, library, views, p)
        plan = plan or DropoutAddPlan(function, library, views, p, key[-1])
        _plans.add(key, plan)
    return plan((x, residual, seed), [*pointers, library.pointer(seed)])


class DropoutAddPlan(Plan):
    """The kernel for one signature."""

    def __init__(
        self, function: str, library: Any, views: Mapping[str, View], p: float, aligned: bool
    ) -> None:
        x, like = views["x"], views.get("residual", views["x"])
        super().__init__(x.device)
        self.library = library
        self.shape, self.strides = x.shape, result_strides(library, x)
        self.launch = None
        if 0 in x.shape:
            return
        rows = Rows(function, {**views, "out": like._replace(strides=self.strides)})
        config = kernels.dropout_add(x.dtype, like.dtype, aligned and rows.aligned)
        threshold = dropout_threshold(p)
        params = config.params(
            **rows.strides,
            shape=rows.shape(0.0),
            threshold=threshold,
            scale=dropout_scale(threshold),
        )
        grid = require_grid(function, config.grid(rows.rows, rows.columns), x.shape)
        self.launch = Launch(config, x.device, grid, params)

    def run(self, arrays: tuple[Array, Array | None, Array], pointers: list[int]) -> Array:
        """One launch; ``arrays`` and ``pointers`` of x, residual and seed."""
        (x, residual, _), (*inputs, seed) = arrays, pointers
        library = self.library
        out = library.empty(self.shape, self.strides, x if residual is None else residual)
        if self.launch is not None:
            stream = library.stream(self.device_id)
            self.launch.start(stream, self.launch.argument(*inputs, library.pointer(out), seed))
        return out


def _copying(function: str, library: Any, views: Mapping[str, View], p: float) -> Detour | None:
    """The detour of `add` for strides that the kernel does not address; None for all others."""
    strides = result_strides(library, views["x"])
    copied = rows_to_copy(strides, views, ("x", "residual"))
    if not copied:
        return None

    def call(arrays: tuple[Array, Array | None, Array], pointers: list[int]) -> Array:
        x, residual, seed = arrays
        x = dense(library, x, strides, x) if "x" in copied else x
        if "residual" in copied:
            residual = dense(library, residual, strides, residual)
        return add(function, library, x, residual, p, seed)

    return Detour(library, views["x"].device, call)
