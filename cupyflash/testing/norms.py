"""The tolerance rule for norms: float64, and a framework's separate operations."""

from typing import Any

import numpy

from ..ops.group_norm import reference as group_norms
from ..ops.norm import reference as norms
from .tolerance import Expected, Result, dtype_name, numpy_dtype, to_numpy64

Array = numpy.ndarray
LARGEST_SLOPE = 1.2  # the largest slope of any activation


def expected_norm(
    rms: bool,
    dout: Any,
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    dresidual: Any = None,
    *,
    eps: float,
    factors: Array | None = None,
) -> Expected:
    """Forward and backward of `cupyflash.layer_norm` or `rms_norm`, arrays of any library.

    Args:
        factors: float64 like x, what dropout multiplies it by; then the gradient of h is "dh".
    """
    given = (dout, x, weight, bias, residual, dresidual)
    dtypes = [None if y is None else dtype_name(y) for y in given]
    wide = [None if y is None else to_numpy64(y) for y in given]
    if weight is None:
        dtypes[2], wide[2] = dtypes[1], numpy.ones(x.shape[-1])
    narrow = [None if y is None else y.astype(numpy_dtype(name)) for y, name in zip(wide, dtypes)]
    exact, yardstick = (_norm(rms, *arrays, eps, factors) for arrays in (wide, narrow))
    h = wide[1] if exact["h"] is None else exact["h"]
    n = _normal_terms(h, exact["stats"])
    dout64, weight64 = numpy.abs(wide[0]), numpy.abs(wide[2])
    g, scale = dout64 * weight64, exact["stats"][..., 1:]
    dx = scale * (g + g.mean(-1, keepdims=True) + n * (g * n).mean(-1, keepdims=True))
    rows = tuple(range(wide[1].ndim - 1))
    dh = dx + (0 if dresidual is None else numpy.abs(wide[5]))
    terms = {
        "stats": _stats_terms(h, exact["stats"], n),
        "out": n * weight64 + (0 if bias is None else numpy.abs(wide[3])),
        "dx": dh if factors is None else dh * factors,
        "dh": dh,
        "dweight": (dout64 * n).sum(rows),
        "dbias": dout64.sum(rows),
    }
    stream = dtypes[1] if residual is None else dtypes[4]  # the dtype of h and its gradient
    kinds = {"out": dtypes[1], "h": stream, "dh": stream, "stats": "float32"}
    kinds["dx"] = stream if factors is None else dtypes[1]
    kinds |= {"dweight": dtypes[2], "dbias": dtypes[2]}
    return _expected(exact, yardstick, kinds, terms)


def expected_group_norm(
    dout: Any, x: Any, num_groups: int, weight: Any, bias: Any, activation: str | None, eps: float
) -> Expected:
    """Forward and backward of `cupyflash.group_norm`, arrays of any library."""
    given = (dout, x, weight, bias)
    dtypes = [dtype_name(x if y is None else y) for y in given]
    wide = [None if y is None else to_numpy64(y) for y in given]
    if weight is None:
        wide[2:] = numpy.ones(x.shape[1]), numpy.zeros(x.shape[1])
    narrow = [y.astype(numpy_dtype(name)) for y, name in zip(wide, dtypes)]
    activation = activation or "none"
    exact = _group_norm(*wide, num_groups, activation, eps)
    yardstick = _group_norm(*narrow, num_groups, activation, eps)
    groups = lambda y: y.reshape(x.shape[0], num_groups, -1)  # noqa: E731
    n = _normal_terms(groups(wide[1]), exact["stats"]).reshape(x.shape) if x.size else wide[1]
    per_channel = (-1, *[1] * (n.ndim - 2))
    weight64, bias64 = (numpy.abs(y).reshape(per_channel) for y in wide[2:])
    dout64, scale = LARGEST_SLOPE * numpy.abs(wide[0]), exact["stats"][..., 1:]
    g, by_group = groups(dout64 * weight64), groups(n)
    axes = (0, *range(2, n.ndim))
    means = g.mean(-1, keepdims=True), (g * by_group).mean(-1, keepdims=True)
    terms = {
        "stats": _stats_terms(groups(wide[1]), exact["stats"], by_group),
        "out": n * weight64 + bias64,
        "dx": scale * (g + means[0] + by_group * means[1]) if n.size else n,
        "dweight": (dout64 * n).sum(axes),
        "dbias": dout64.sum(axes),
    }
    kinds = {"out": dtypes[1], "dx": dtypes[1], "stats": "float32"}
    kinds |= {"dweight": dtypes[2], "dbias": dtypes[2]}
    return _expected(exact, yardstick, kinds, terms)


def _normal_terms(x: Array, stats: Array) -> Array:
    """Magnitudes behind (x - mean) * scale: a large mean costs digits."""
    return (numpy.abs(x) + numpy.abs(stats[..., :1])) * stats[..., 1:]


def _stats_terms(x: Array, stats: Array, n: Array) -> Array:
    """Magnitudes behind mean and scale, the square root being right to two last places."""
    mean, scale = stats[..., :1], stats[..., 1:]
    deviations = numpy.abs(x - mean) * scale
    of_scale = scale * (2 + (n * deviations).mean(-1, keepdims=True))
    return numpy.concatenate([numpy.abs(x).mean(-1, keepdims=True), of_scale], -1)


def _expected(
    exact: dict[str, Array],
    yardstick: dict[str, Array],
    dtypes: dict[str, str],
    terms: dict[str, Array],
) -> Expected:
    largest = {name: float(y.max()) if y.size else 0.0 for name, y in terms.items()}
    return Expected(
        {
            name: Result(exact[name], yardstick[name], dtype, largest.get(name, 0.0))
            for name, dtype in dtypes.items()
            if exact[name] is not None
        }
    )


def _norm(
    rms: bool,
    dout: Array,
    x: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    dresidual: Array | None,
    eps: float,
    factors: Array | None,
) -> dict[str, Array | None]:
    values = x if factors is None else _times(x, factors, x.dtype)
    if residual is not None:
        values = norms.add(values, residual)
    out, stats = norms.norm(rms, values, weight, bias, eps)
    sums = norms.compute_dtype(values)  # the dtype in which kernels add, too
    dh, dweight, dbias = norms.norm_backward(rms, dout, values, weight, stats, dresidual, sums)
    return {
        "out": out.astype(x.dtype, copy=False),
        "h": None if values is x else values,
        "stats": stats,
        "dx": dh if factors is None else _times(dh, factors, x.dtype),
        "dh": None if factors is None else dh,
        "dweight": dweight,
        "dbias": dbias,
    }


def _times(x: Array, factors: Array, dtype: Any) -> Array:
    """Computes dropout as a framework does."""
    compute = numpy.float64 if x.dtype == numpy.float64 else numpy.float32
    return (x.astype(compute) * factors.astype(compute)).astype(dtype)


def _group_norm(
    dout: Array,
    x: Array,
    weight: Array,
    bias: Array,
    num_groups: int,
    activation: str,
    eps: float,
) -> dict[str, Array]:
    z, stats = group_norms.group_norm(x, num_groups, weight, bias, eps, "none")
    function, slope = norms.ACTIVATIONS[activation]
    compute = stats.dtype
    out = function(z.astype(compute)).astype(x.dtype)
    dz = (dout.astype(compute) * slope(z.astype(compute))).astype(x.dtype)
    arguments = (dz, x, weight, bias, stats, "none")
    dx, dweight, dbias = group_norms.group_norm_backward(*arguments)
    results = {"out": out, "stats": stats}
    return {**results, "dx": dx.reshape(x.shape), "dweight": dweight, "dbias": dbias}
