"""Dropout before a norm: h = dropout(x) + residual by a kernel of its own, then the norm of h."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..runtime.array import Array, View
from ..runtime.checks import require_grid
from ..runtime.launch import Launch
from ..runtime.operation import Plan, Plans
from ..runtime.philox import (
    dropout_scale,
    dropout_threshold,
    is_number,
    require_probability,
    require_seed_array,
    seed_array,
)
from ..runtime.rows import Rows
from . import dropout_kernels, reference
from .detour import Detour, dense, result_strides, rows_to_copy


class Dropout(NamedTuple):
    """Dropout of one call: the probability, and the seed as an array beside x."""

    p: float
    seed: Array


_plans = Plans(wide=2)


def of_call(function: str, library: Any, x: Array, dropout_p: Any, seed: Any) -> Dropout | None:
    """What the options of a call mean, None where nothing is dropped; a seed of None is drawn.

    Raises:
        As `require_probability` and `require_seed_array`.
    """
    if seed is None and type(dropout_p) is float and not dropout_p:
        return None
    dropout_p = require_probability(function, dropout_p)
    array = seed_array(function, library, x, seed, dropout_p)
    if not (seed is None or is_number(seed)):
        require_seed_array(function, library, "x", x, seed)
    return Dropout(dropout_p, array) if dropout_p else None


def of_backward(function: str, library: Any, x: Array, dropout_p: Any, seed: Any) -> Dropout | None:
    """`of_call` of a backward, which cannot draw a seed.

    Raises:
        As `of_call`; ValueError without the seed of the forward.
    """
    if seed is None and type(dropout_p) is float and not dropout_p:
        return None
    if require_probability(function, dropout_p) and seed is None:
        raise ValueError(f"{function}: dropout_p needs the dropout_seed of the forward, got None")
    return of_call(function, library, x, dropout_p, seed)


def split(dropout_p: Any, seed: Any) -> tuple[Array | None, tuple[Any, int | None]]:
    """The seed if it is an array, and (dropout_p, the seed if it is a number)."""
    return (None, (dropout_p, seed)) if is_number(seed) else (seed, (dropout_p, None))


def of_traced_call(
    function: str, library: Any, x: Array, dropout_p: float, seed: Any
) -> Dropout | None:
    """`of_call` in what torch.compile can trace; the operator checks when it runs."""
    if seed is None and not dropout_p:
        return None
    array = seed_array(function, library, x, seed, dropout_p)
    return Dropout(dropout_p, array) if dropout_p else None


def check(function: str, library: Any, x: Array, dropout: Dropout) -> None:
    """What `of_call` checks, where an operator of torch is called without it."""
    require_probability(function, dropout.p)
    require_seed_array(function, library, "x", x, dropout.seed)


def add(function: str, library: Any, x: Array, residual: Array | None, dropout: Dropout) -> Array:
    """dropout(x) + residual like the residual, or like x where there is none, of checked arrays."""
    p, seed = dropout
    if library.on_cpu(x):
        strides = result_strides(library, library.view(x))
        given = [None if y is None else library.to_numpy(y) for y in (x, residual)]
        h = reference.dropout_add(*given, dropout_threshold(p), int(seed.item()))
        return library.from_numpy(h, x if residual is None else residual, strides)
    plan, pointers = _plans.find(
        library,
        (x, residual),
        p,
        lambda: (
            {"x": library.view(x)}
            | ({} if residual is None else {"residual": library.view(residual)})
        ),
        lambda views, aligned: (
            _copying(function, library, views)
            or DropoutAddPlan(function, library, views, p, aligned)
        ),
    )
    if type(plan) is Detour:
        return plan(x, residual, dropout)
    return plan(x, residual, pointers, library.pointer(seed))


def forward(library: Any, views: Mapping[str, View], add_: Callable, norm: Callable) -> Detour:
    """The detour of `dispatch.forward` with dropout.

    Args:
        add_: makes h of (x, residual, dropout).
        norm: `dispatch.forward` without dropout, of (x, weight, bias, residual, need_stats).
    """
    x, residual = views["x"], views.get("residual")
    wide = residual is not None and residual.dtype != x.dtype
    strides = result_strides(library, x)

    def call(
        x: Array, weight: Array, bias: Array, residual: Array, need_stats: bool, dropout: Dropout
    ) -> tuple:
        h = add_(x, residual, dropout)
        if wide:
            weight, bias = (None if y is None else library.cast(y, h) for y in (weight, bias))
        out, _, stats = norm(h, weight, bias, None, need_stats)
        return dense(library, out, strides, x) if wide else out, h, stats

    return Detour(library, x.device, call)


class DropoutAddPlan(Plan):
    """The kernel for one signature."""

    def __init__(
        self, function: str, library: Any, views: Mapping[str, View], p: float, aligned: bool
    ) -> None:
        x, like = views["x"], views.get("residual", views["x"])
        super().__init__(x.device)
        self.library = library
        self.shape, self.strides = x.shape, result_strides(library, x)
        self.empty = 0 in x.shape
        if self.empty:
            return
        rows = Rows(function, {**views, "out": like._replace(strides=self.strides)})
        config = dropout_kernels.dropout_add(x.dtype, like.dtype, aligned and rows.aligned)
        threshold = dropout_threshold(p)
        params = config.params(
            **rows.strides,
            shape=rows.shape(0.0),
            threshold=threshold,
            scale=dropout_scale(threshold),
        )
        grid = require_grid(function, config.grid(rows.rows, rows.columns), x.shape)
        self.launch = Launch(config, x.device, grid, params)

    def run(self, x: Array, residual: Array | None, pointers: tuple[int, int], seed: int) -> Array:
        """``pointers`` of x and residual, and the one of the seed."""
        library = self.library
        out = library.empty(self.shape, self.strides, x if residual is None else residual)
        if not self.empty:
            self.launch(library.stream(self.device_id), *pointers, library.pointer(out), seed)
        return out


def _copying(function: str, library: Any, views: Mapping[str, View]) -> Detour | None:
    """The detour of `add` for strides that the kernel does not address; None for all others."""
    strides = result_strides(library, views["x"])
    copied = rows_to_copy(strides, views, ("x", "residual"))
    if not copied:
        return None

    def call(x: Array, residual: Array, dropout: Dropout) -> Array:
        x = dense(library, x, strides, x) if "x" in copied else x
        if "residual" in copied:
            residual = dense(library, residual, strides, residual)
        return add(function, library, x, residual, dropout)

    return Detour(library, views["x"].device, call)
