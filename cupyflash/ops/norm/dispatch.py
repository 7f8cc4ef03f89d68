"""LayerNorm and RMSNorm from arrays to plans; a call of known signature is one look-up.

The kernels do not take all arrays: not strides that they cannot address, no residual wider than x,
and no weight that is None (they read one of ones). Then a `Detour` makes the same call on copies;
the signature tells which. Dropout is a launch of its own before the norm.
"""

from collections.abc import Mapping
from typing import Any

import numpy

from ...runtime.array import Array, View
from ...runtime.checks import require_eps
from ...runtime.operation import Plan, Plans
from ...runtime.philox import SEED_ARRAY
from ...runtime.rows import Detour, dense, filled, result_strides, rows_to_copy
from ...runtime.specs import Spec, views_of
from . import dropout, reference
from .plan import BackwardPlan, ForwardPlan

COLUMNS = range(1, 2**30)  # columns of a row
EITHER = "like x or float32"
ROWS = Spec((..., "columns"), strides="free")
SPECS = {
    "x": ROWS,
    "weight": Spec(("columns",), EITHER, optional=True),
    "bias": Spec(("columns",), "like weight", optional=True),
    "residual": ROWS._replace(dtype=EITHER, optional=True),
    "dropout_seed": SEED_ARRAY,
}
# After a wider residual the input of the norm is wider than its result.
BACKWARD_SPECS = {
    "x": ROWS,
    "dout": ROWS._replace(dtype="like x or narrower"),
    "weight": Spec(("columns",), "like dout or float32", optional=True),
    "stats": Spec((..., 2), "float32"),
    "dresidual": ROWS._replace(optional=True),
    "dropout_seed": SEED_ARRAY,
}

_forward_plans = Plans(wide=4)
_backward_plans = Plans(wide=5)


def forward(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple
) -> tuple[Array, Array | None, Array | None]:
    """(out, h, statistics); h, the input of the norm, is None where that is x itself.

    Args:
        arrays: x, weight, bias, residual, and the seed of dropout if it is an array.
        options: rms, eps, whether the statistics are needed, and as `dropout.split`.
    """
    (x, weight, bias, residual, seed), (rms, eps, need_stats, p, number) = arrays, options
    if type(eps) is not float:  # the key of a plan, so a plain number
        eps = require_eps(function, eps)
    p, seed = dropout.resolve(function, library, x, p, number, seed)

    def check() -> dict[str, View]:
        if bias is not None and weight is None:
            raise TypeError(f"{function}: weight must be an array where bias is one, got None")
        given = (x, weight, bias, residual, seed)
        views = views_of(function, library, SPECS, given, columns=COLUMNS)
        require_eps(function, eps)
        return views

    arrays = (x, residual, weight, bias, seed)
    if library.on_cpu(x):
        strides = result_strides(library, check()["x"])
        return _forward_on_cpu(function, library, arrays, (rms, eps, p), strides)
    key, pointers = _forward_plans.key(library, arrays, (rms, eps, p))
    plan = _forward_plans.get(key)
    if plan is None:
        views = check()
        plan = _forward_detour(function, library, views, rms, eps, p)
        plan = plan or ForwardPlan(function, rms, library, views, eps, key[-1])
        _forward_plans.add(key, plan)
    return plan(arrays, pointers, need_stats)


def backward(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple
) -> tuple[Array | None, ...]:
    """(dx, dweight, dbias), with dropout (dx, dweight, dbias, dh).

    dbias is None unless it is wanted; without a weight dweight and dbias are None.

    Args:
        arrays: dout, x, weight, stats, dresidual, and the seed of dropout if it is an array.
        options: rms, whether dbias is wanted, and as `dropout.split`.
    """
    (dout, x, weight, stats, dresidual, seed), (rms, need_dbias, p, number) = arrays, options
    p, seed = dropout.resolve(function, library, x, p, number, seed, drawn=False)

    def check() -> dict[str, View]:
        given = (x, dout, weight, stats, dresidual, seed)
        return views_of(function, library, BACKWARD_SPECS, given, columns=COLUMNS)

    arrays = (dout, x, weight, stats, dresidual, seed)
    if library.on_cpu(x):
        strides = result_strides(library, check()["x"])
        results = _backward_on_cpu(library, arrays[:-1], (rms, need_dbias), strides)
    else:
        key, pointers = _backward_plans.key(library, arrays, (rms, need_dbias))
        plan = _backward_plans.get(key)
        if plan is None:
            views = check()
            plan = _backward_detour(function, library, views, rms, need_dbias)
            plan = plan or BackwardPlan(function, rms, library, views, key[-1], need_dbias)
            _backward_plans.add(key, plan)
        results = plan(arrays, pointers)
    if not p:
        return results
    dh, *sums = results
    dx = dropout.add(function, library, dh, None, p, seed)
    return library.cast(dx, dout), *sums, dh


def _forward_on_cpu(
    function: str,
    library: Any,
    arrays: tuple[Array | None, ...],
    options: tuple[bool, float, float],
    strides: tuple[int, ...],
) -> tuple[Array, Array | None, Array]:
    """`forward` by the reference, with results of these strides."""
    (x, residual, weight, bias, seed), (rms, eps, p) = arrays, options
    h, values = None, library.to_numpy(x)
    if p:
        h = dropout.add(function, library, x, residual, p, seed)
    elif residual is not None:
        h = reference.add(values, library.to_numpy(residual))
        h = library.from_numpy(h, residual, strides)
    dtype, values = values.dtype, values if h is None else library.to_numpy(h)
    scales = [None if y is None else library.to_numpy(y) for y in (weight, bias)]
    if weight is None:
        scales[0] = numpy.ones(x.shape[-1], values.dtype)
    out, stats = reference.norm(rms, values, *scales, eps)
    out = out.astype(dtype, copy=False)
    return library.from_numpy(out, x, strides), h, library.from_numpy(stats)


def _backward_on_cpu(
    library: Any,
    arrays: tuple[Array | None, ...],
    options: tuple[bool, bool],
    strides: tuple[int, ...],
) -> tuple[Array, Array | None, Array | None]:
    """(dx, dweight, dbias) by the reference."""
    _, x, weight, *_ = arrays
    rms, need_dbias = options
    values = [None if y is None else library.to_numpy(y) for y in arrays]
    if weight is None:
        values[2] = numpy.ones(x.shape[-1], values[1].dtype)
    dx, *sums = reference.norm_backward(rms, *values)
    dx = library.from_numpy(dx, x, strides)
    if weight is None:
        return dx, None, None
    dweight, dbias = (library.from_numpy(y, weight) for y in sums)
    return dx, dweight, dbias if need_dbias else None


def _forward_detour(
    function: str, library: Any, views: Mapping[str, View], rms: bool, eps: float, p: float
) -> Plan | None:
    """The plan that copies arrays or drops first; None where the kernel takes them as they are."""
    x, residual = views["x"], views.get("residual")
    strides = result_strides(library, x)
    copied = rows_to_copy(strides, views, ("x", "residual"))
    wide = residual is not None and residual.dtype != x.dtype
    if "weight" in views and not (wide or copied or p):
        return None

    def call(arrays: tuple[Array | None, ...], pointers: list[int], need_stats: bool) -> tuple:
        x, residual, weight, bias, seed = arrays
        values, like = x, residual if wide else x
        if p:
            values, residual = dropout.add(function, library, x, residual, p, seed), None
        elif wide or "x" in copied:
            values = dense(library, x, strides, like)
        if residual is not None and "residual" in copied:
            residual = dense(library, residual, strides, residual)
        if weight is None:
            weight = filled(library, x.shape[-1], 1.0, x)
        elif wide:
            weight, bias = (None if y is None else library.cast(y, like) for y in (weight, bias))
        given = (values, weight, bias, residual, None)
        out, h, stats = forward(function, library, given, (rms, eps, need_stats, 0.0, None))
        return dense(library, out, strides, x) if wide else out, values if p else h, stats

    return Detour(library, x.device, call)


def _backward_detour(
    function: str, library: Any, views: Mapping[str, View], rms: bool, need_dbias: bool
) -> Plan | None:
    """The plan that copies arrays first; None where the kernels take them as they are."""
    x = views["x"]
    strides = result_strides(library, x)
    copied = rows_to_copy(strides, views, ("dout", "x", "dresidual"))
    wide = views["dout"].dtype != x.dtype
    if "weight" in views and not (wide or copied):
        return None

    def call(arrays: tuple[Array | None, ...], pointers: list[int]) -> tuple:
        dout, x, weight, stats, dresidual, _ = arrays
        if wide or "dout" in copied:
            dout = dense(library, dout, strides, x)
        if "dresidual" in copied:
            dresidual = dense(library, dresidual, strides, dresidual)
        values = dense(library, x, strides, x) if "x" in copied else x
        if weight is None:
            scales = filled(library, x.shape[-1], 1.0, x)
        else:
            scales = library.cast(weight, x) if wide else weight
        given = (dout, values, scales, stats, dresidual, None)
        dx, *sums = backward(function, library, given, (rms, need_dbias, 0.0, None))
        if weight is None:
            return dx, None, None
        if wide:
            sums = (None if y is None else library.cast(y, weight) for y in sums)
        return dx, *sums

    return Detour(library, x.device, call)
