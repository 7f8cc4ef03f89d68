"""LayerNorm and RMSNorm from arrays to plans; a call of known signature is one look-up."""

from collections.abc import Mapping
from typing import Any

from ..array import Array, View
from ..checks import require_eps, require_like, require_stats, require_weights, views_of
from ..kernel_launch import keep
from . import reference
from .plan import BackwardPlan, ForwardPlan

MAX_COLUMNS = 2**30

_forward_plans: dict[tuple, ForwardPlan] = {}
_backward_plans: dict[tuple, BackwardPlan] = {}


def forward(
    function: str,
    rms: bool,
    library: Any,
    x: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    eps: float,
    need_stats: bool,
) -> tuple[Array, Array | None, Array | None]:
    """(out, x + residual, statistics); the second is None without a residual."""

    def check() -> dict[str, View]:
        arrays = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        return _check_forward(function, library, arrays, eps)

    if library.on_cpu(x):
        check()
        h = None
        if residual is not None:
            x = h = library.from_numpy(
                reference.add(library.to_numpy(x), library.to_numpy(residual)), x
            )
        arrays = [None if y is None else library.to_numpy(y) for y in (x, weight, bias)]
        out, stats = reference.norm(rms, *arrays, eps)
        return library.from_numpy(out, x), h, library.from_numpy(stats)
    try:
        pointer, signature = library.pointer, library.signature
        pointers = (
            pointer(x),
            0 if residual is None else pointer(residual),
            pointer(weight),
            0 if bias is None else pointer(bias),
        )
        signatures = (
            signature(x),
            signature(weight),
            None if bias is None else signature(bias),
            None if residual is None else signature(residual),
        )
    except AttributeError:  # an array of another library
        check()
        raise
    aligned = (pointers[0] | pointers[1] | pointers[2] | pointers[3]) % 16 == 0
    key = (rms, signatures, eps, aligned)
    plan = _forward_plans.get(key)
    if plan is None:
        plan = ForwardPlan(function, rms, library, check(), float(eps), aligned)
        keep(_forward_plans, key, plan)
    return plan(x, pointers, need_stats)


def backward(
    function: str,
    rms: bool,
    library: Any,
    dout: Array,
    x: Array,
    weight: Array,
    stats: Array,
    dresidual: Array | None,
    need_dbias: bool,
) -> tuple[Array, Array, Array | None]:
    """(dx, dweight, dbias); the last is None unless wanted."""

    def check() -> dict[str, View]:
        arrays = {"x": x, "dout": dout, "weight": weight, "stats": stats, "dresidual": dresidual}
        return _check_backward(function, library, arrays)

    if library.on_cpu(x):
        check()
        inputs = (dout, x, weight, stats, dresidual)
        numpy_arrays = [None if y is None else library.to_numpy(y) for y in inputs]
        dx, dweight, dbias = reference.norm_backward(rms, *numpy_arrays)
        dweight, dbias = (library.from_numpy(y, weight) for y in (dweight, dbias))
        return library.from_numpy(dx, x), dweight, dbias if need_dbias else None
    try:
        pointer, signature = library.pointer, library.signature
        pointers = (
            pointer(dout),
            pointer(x),
            pointer(weight),
            pointer(stats),
            0 if dresidual is None else pointer(dresidual),
        )
        signatures = (
            signature(dout),
            signature(x),
            signature(weight),
            signature(stats),
            None if dresidual is None else signature(dresidual),
        )
    except AttributeError:
        check()
        raise
    aligned = (pointers[0] | pointers[1] | pointers[2] | pointers[4]) % 16 == 0
    key = (rms, signatures, aligned, need_dbias)
    plan = _backward_plans.get(key)
    if plan is None:
        plan = BackwardPlan(function, rms, library, check(), aligned, need_dbias)
        keep(_backward_plans, key, plan)
    return plan(x, weight, pointers)


def _check_forward(
    function: str, library: Any, arrays: Mapping[str, Array | None], eps: float
) -> dict[str, View]:
    views = views_of(function, library, arrays)
    if "weight" not in views:
        raise TypeError(f"{function}: weight must be an array, got None")
    columns = _check_rows(function, views)
    require_like(function, views, "residual", "x")
    require_weights(function, views, "x", columns)
    require_eps(function, eps)
    return views


def _check_backward(
    function: str, library: Any, arrays: Mapping[str, Array | None]
) -> dict[str, View]:
    views = views_of(function, library, arrays)
    columns = _check_rows(function, views)
    for name in ("dout", "dresidual"):
        require_like(function, views, name, "x")
    require_weights(function, views, "x", columns)
    require_stats(function, views, (*views["x"].shape[:-1], 2))
    return views


def _check_rows(function: str, views: Mapping[str, View]) -> int:
    """The number of columns."""
    x = views["x"]
    if not x.shape:
        raise ValueError(f"{function}: x must have at least one dimension, got none")
    if not 1 <= x.shape[-1] < MAX_COLUMNS:
        fact = f"the last dimension of x must have 1 to {MAX_COLUMNS - 1} numbers"
        raise ValueError(f"{function}: {fact}, got {x.shape}")
    for name in ("x", "residual", "dout", "dresidual"):
        y = views.get(name)
        if y and y.shape and y.shape[-1] > 1 and y.strides[-1] != 1 and 0 not in y.shape:
            fact = f"the last dimension of {name} must be contiguous"
            raise ValueError(f"{function}: {fact}, got strides {y.strides}")
    return x.shape[-1]
