"""LayerNorm and RMSNorm from arrays to plans; a call of known signature is one look-up."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy

from ..runtime.array import Array, View
from ..runtime.checks import require_eps, require_like, require_stats, require_weights, views_of
from ..runtime.config import weight_dtypes
from ..runtime.operation import Plan, Plans
from . import detour, reference
from . import dropout as dropouts
from .detour import Detour, result_strides
from .dropout import Dropout
from .plan import BackwardPlan, ForwardPlan

MAX_COLUMNS = 2**30

_forward_plans = Plans(wide=4)
_backward_plans = Plans(wide=5)


def call_forward(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple
) -> tuple[Array, Array | None, Array | None]:
    """`forward` of (x, weight, bias, residual, seed of dropout).

    Args:
        options: rms, eps, whether the statistics are needed, and as `dropouts.split`.
    """
    (*tensors, seed), (rms, eps, need_stats, p, number) = arrays, options
    seed = number if seed is None else seed
    dropout = dropouts.of_call(function, library, tensors[0], p, seed)
    return forward(function, rms, library, *tensors, eps, need_stats, dropout)


def call_backward(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple
) -> tuple[Array | None, ...]:
    """`backward` of (dout, x, weight, stats, dresidual, seed): (dx, dweight, dbias).

    With dropout (dx, dweight, dbias, dh).

    Args:
        options: rms, whether dbias is wanted, and as `dropouts.split`.
    """
    (*tensors, seed), (rms, need_dbias, p, number) = arrays, options
    seed = number if seed is None else seed
    dropout = dropouts.of_backward(function, library, tensors[1], p, seed)
    dh, *sums = backward(function, rms, library, *tensors, need_dbias)
    if dropout is None:
        return dh, *sums
    dx = dropouts.add(function, library, dh, None, dropout)
    return library.cast(dx, tensors[0]), *sums, dh


def forward(
    function: str,
    rms: bool,
    library: Any,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    residual: Array | None,
    eps: float,
    need_stats: bool,
    dropout: Dropout | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """(out, h, statistics); h, what was normalised, is None if that is x itself."""
    if type(eps) is not float:  # the key of a plan, so a plain number
        eps = require_eps(function, eps)

    def check() -> dict[str, View]:
        arrays = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        views = _check_forward(function, library, arrays, eps)
        if dropout is not None:
            dropouts.check(function, library, x, dropout)
        return views

    if library.on_cpu(x):
        strides = result_strides(library, check()["x"])
        h, values = None, library.to_numpy(x)
        if dropout is not None:
            h = dropouts.add(function, library, x, residual, dropout)
            values = library.to_numpy(h)
        elif residual is not None:
            total = reference.add(values, library.to_numpy(residual))
            h = library.from_numpy(total, residual, strides)
            values = library.to_numpy(h)
        scales = [None if y is None else library.to_numpy(y) for y in (weight, bias)]
        if weight is None:
            scales[0] = numpy.ones(x.shape[-1], values.dtype)
        out, stats = reference.norm(rms, values, *scales, eps)
        out = out.astype(library.to_numpy(x).dtype, copy=False)
        return library.from_numpy(out, x, strides), h, library.from_numpy(stats)
    again = lambda x, weight, bias, residual, need_stats: forward(  # noqa: E731
        function, rms, library, x, weight, bias, residual, eps, need_stats
    )

    def make(views: dict[str, View], aligned: bool) -> Plan:
        if dropout is not None:
            add = functools.partial(dropouts.add, function, library)
            return dropouts.forward(library, views, add, again)
        plan = detour.norm_forward(library, views, again)
        return plan or ForwardPlan(function, rms, library, views, eps, aligned)

    arrays, options = (x, residual, weight, bias), (rms, eps)
    if dropout is not None:
        arrays, options = (*arrays, dropout.seed), (rms, eps, dropout.p)
    plan, pointers = _forward_plans.find(library, arrays, options, check, make)
    if dropout is not None:
        return plan(x, weight, bias, residual, need_stats, dropout)
    if type(plan) is Detour:
        return plan(x, weight, bias, residual, need_stats)
    return plan(x, pointers, need_stats)


def backward(
    function: str,
    rms: bool,
    library: Any,
    dout: Array,
    x: Array,
    weight: Array | None,
    stats: Array,
    dresidual: Array | None,
    need_dbias: bool,
) -> tuple[Array, Array | None, Array | None]:
    """(dx, dweight, dbias); the last is None unless wanted, both are without a weight."""

    def check() -> dict[str, View]:
        arrays = {"x": x, "dout": dout, "weight": weight, "stats": stats, "dresidual": dresidual}
        return _check_backward(function, library, arrays)

    if library.on_cpu(x):
        strides = result_strides(library, check()["x"])
        inputs = (dout, x, weight, stats, dresidual)
        numpy_arrays = [None if y is None else library.to_numpy(y) for y in inputs]
        if weight is None:
            numpy_arrays[2] = numpy.ones(x.shape[-1], numpy_arrays[1].dtype)
        dx, dweight, dbias = reference.norm_backward(rms, *numpy_arrays)
        dx = library.from_numpy(dx, x, strides)
        if weight is None:
            return dx, None, None
        dweight, dbias = (library.from_numpy(y, weight) for y in (dweight, dbias))
        return dx, dweight, dbias if need_dbias else None
    again = lambda *arrays: backward(function, rms, library, *arrays, need_dbias)  # noqa: E731
    plan, pointers = _backward_plans.find(
        library,
        (dout, x, weight, stats, dresidual),
        (rms, need_dbias),
        check,
        lambda views, aligned: (
            detour.norm_backward(library, views, again)
            or BackwardPlan(function, rms, library, views, aligned, need_dbias)
        ),
    )
    if type(plan) is Detour:
        return plan(dout, x, weight, stats, dresidual)
    return plan(x, weight, pointers)


def _check_forward(
    function: str, library: Any, arrays: Mapping[str, Array | None], eps: float
) -> dict[str, View]:
    views = views_of(function, library, arrays)
    columns = _check_rows(function, views)
    _require_residual(function, views)
    if "bias" in views and "weight" not in views:
        raise TypeError(f"{function}: weight must be an array where bias is one, got None")
    require_weights(function, views, "x", columns)
    require_eps(function, eps)
    return views


def _check_backward(
    function: str, library: Any, arrays: Mapping[str, Array | None]
) -> dict[str, View]:
    views = views_of(function, library, arrays)
    for name in ("dout", "stats"):
        if name not in views:
            raise TypeError(f"{function}: {name} must be an array, got None")
    columns, x = _check_rows(function, views), views["x"]
    require_like(function, views, "dresidual", "x")
    dout = views["dout"]
    # Of a wider residual is what was normalised, but not what came out.
    require_like(function, {"x": x._replace(dtype=dout.dtype), "dout": dout}, "dout", "x")
    if x.dtype not in (dout.dtype, "float32"):
        fact = f"dout must have the dtype of x, {x.dtype}"
        raise TypeError(f"{function}: {fact}, got {dout.dtype}")
    require_weights(function, views, "dout", columns)
    require_stats(function, views, (*x.shape[:-1], 2))
    return views


def _require_residual(function: str, views: Mapping[str, View]) -> None:
    """Of the shape of x, and of its dtype or float32."""
    x, residual = views["x"], views.get("residual")
    if residual is None:
        return
    require_like(function, {"x": x, "residual": residual._replace(dtype=x.dtype)}, "residual", "x")
    if residual.dtype not in weight_dtypes(x.dtype):
        fact = f"residual must have the dtype of x, {x.dtype}, or be float32"
        raise TypeError(f"{function}: {fact}, got {residual.dtype}")


def _check_rows(function: str, views: Mapping[str, View]) -> int:
    """The number of columns."""
    x = views["x"]
    if not x.shape:
        raise ValueError(f"{function}: x must have at least one dimension, got none")
    if not 1 <= x.shape[-1] < MAX_COLUMNS:
        fact = f"the last dimension of x must have 1 to {MAX_COLUMNS - 1} numbers"
        raise ValueError(f"{function}: {fact}, got {x.shape}")
    return x.shape[-1]
