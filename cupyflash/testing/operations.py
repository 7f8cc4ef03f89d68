"""The tolerance rule for norms, projections and transformer blocks: float64, and a framework's
separate operations.

The yardstick computes one operation after the other, as a framework does without fusion: the
residual, the norm, each product with its bias, the activation, each step of the rotary embedding.
Each is float32 inside, and its result is rounded to the dtype.
"""

from typing import Any

import numpy

from ..ops.block import reference as stack_reference
from ..ops.group_norm import reference as group_norms
from ..ops.linear.reference import Arrays, Options, project
from ..ops.norm import reference as norms
from .tolerance import Expected, Result, dtype_name, numpy_dtype, to_numpy64

Array = numpy.ndarray
LARGEST_SLOPE = 1.2  # the largest slope of any activation
STACK_EPS = 1e-5  # eps of the norms of a stack
# The largest sum of magnitudes behind a result of a stack, in units of the largest result: products
# of unit vectors, sums of a few of them.
STACK_TERMS = 8.0


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
    dout64, scale = 1.2 * numpy.abs(wide[0]), exact["stats"][..., 1:]  # slopes are below 1.2
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


def expected_projection(arrays: Arrays, options: Options, down: Arrays | None = None) -> Expected:
    """`cupyflash.linear` or `cupyflash.qkv_projection` ("out"); with ``down`` an MLP.

    Args:
        arrays: of any library.
        down: of the second projection; its x does not count.
    """
    dtype = dtype_name(arrays.x)
    wide, narrow = _converted(arrays, wide=True), _converted(arrays, wide=False)
    rounded = lambda y: y.astype(numpy_dtype(dtype)).astype("float32")  # noqa: E731
    exact, yardstick = project(wide, options), project(narrow, options, rounded)
    terms = _terms(wide, options)
    if down is not None:
        wide = _converted(down._replace(x=None), wide=True)._replace(x=exact)
        narrow = _converted(down._replace(x=None), wide=False)._replace(x=yardstick)
        exact, yardstick = project(wide, Options()), project(narrow, Options(), rounded)
        terms = _terms(wide, Options())
    largest = float(terms.max()) if terms.size else 0.0
    return Expected({"out": Result(exact, yardstick, dtype, largest)})


def _converted(arrays: Arrays, wide: bool) -> Arrays:
    """NumPy arrays in float64, or in their own dtypes."""

    def convert(name: str, x: Any) -> Array | None:
        if x is None or name == "positions":
            return x if x is None else to_numpy64(x).astype("int64")
        values = to_numpy64(x)
        return values if wide else values.astype(numpy_dtype(dtype_name(x)))

    return Arrays(*(convert(name, x) for name, x in arrays._asdict().items()))


def _terms(arrays: Arrays, options: Options) -> Array:
    """Magnitudes behind each result."""
    x = arrays.x
    if arrays.norm_weight is not None:
        x = norms.norm(options.rms, x, arrays.norm_weight, arrays.norm_bias, options.eps)[0]
    terms = _sum_of_magnitudes(x, arrays.weight, arrays.bias)
    if arrays.gate_weight is not None:
        no_gate = arrays._replace(x=x, norm_weight=None, gate_weight=None, residual=None)
        gate = project(
            no_gate._replace(weight=arrays.gate_weight, bias=arrays.gate_bias), Options()
        )
        of_gate = _sum_of_magnitudes(x, arrays.gate_weight, arrays.gate_bias)
        up = numpy.abs(project(no_gate, Options()))
        activated = numpy.abs(norms.ACTIVATIONS[options.activation][0](gate))
        terms = activated * terms + LARGEST_SLOPE * of_gate * up
    else:
        terms = LARGEST_SLOPE * terms
    if arrays.cos is not None:
        terms = 2 * terms
    return terms if arrays.residual is None else terms + numpy.abs(arrays.residual)


def _sum_of_magnitudes(x: Array, weight: Array, bias: Array | None) -> Array:
    terms = numpy.abs(x) @ numpy.abs(weight).T
    return terms if bias is None else terms + numpy.abs(bias)


def expected_stack(
    blocks: list,
    x: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any,
    *,
    tokens: Any = None,
    ends: dict[str, Any] | None = None,
) -> Expected:
    """out, logits (with tokens and ends) and the caches after a call; nothing is changed.

    Args:
        blocks: of `BlockWeights`, arrays of any library.
        k_cache: (layers, batch, max_length, heads, head_dim).
        ends: the arguments of `BlockStack` that logits need.
    """
    dtype = dtype_name(k_cache)
    lengths = to_numpy64(lengths).astype(int)
    wide = [type(block)(*map(to_numpy64, block)) for block in blocks]
    caches = [to_numpy64(y) for y in (k_cache, v_cache)]
    narrow = numpy_dtype(dtype)
    round_to = lambda y: y.astype(narrow).astype("float32")  # noqa: E731
    ends = {name: to_numpy64(y) for name, y in (ends or {}).items()}
    found = []
    for compute, rounded in (("float64", stack_reference.exact), ("float32", round_to)):
        as_computed = lambda y: y.astype(compute)  # noqa: B023, E731
        here = {name: as_computed(y) for name, y in ends.items()}
        if tokens is None:
            start = as_computed(to_numpy64(x))
        else:
            tables = (here["token_embedding"], here["position_embedding"])
            start = rounded(stack_reference.embed(to_numpy64(tokens).astype(int), lengths, *tables))
        stack = [type(block)(*map(as_computed, block)) for block in wide]
        out, *new = stack_reference.stack(
            start, stack, *map(as_computed, caches), lengths, STACK_EPS, rounded
        )
        results = {"out": out}
        for name, cache, values in zip(("k_cache", "v_cache"), caches, new):
            results[name] = cache.copy()
            for b, length in enumerate(lengths):
                results[name][:, b, length] = values[:, b]
        if ends:
            norm = stack_reference.norm(
                False, out, here["final_weight"], here["final_bias"], STACK_EPS
            )[0]
            results["logits"] = rounded(rounded(norm) @ here["head_weight"].T)
        found.append(results)
    exact, yardstick = found
    results = {}
    for name, right in exact.items():
        own = "float32" if name == "logits" else dtype
        terms = STACK_TERMS * float(numpy.abs(right).max())
        results[name] = Result(right, yardstick[name], own, terms, dtype)
    return Expected(results)
