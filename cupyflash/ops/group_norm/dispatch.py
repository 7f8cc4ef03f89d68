"""The way from the arrays of a GroupNorm to its plan: checks, CPU or GPU, copies."""

import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy

from ...runtime.array import Array, View
from ...runtime.checks import require_eps
from ...runtime.operation import Plans
from ...runtime.rows import Detour, dense, filled
from ...runtime.specs import Spec, views_of
from . import reference
from .groups import dense_like, layout_of
from .plan import BackwardPlan, ForwardPlan

X = Spec(("batch", "channels", ...), strides="free")
SPECS = {
    "x": X,
    "weight": Spec(("channels",), "like x or float32", optional=True),
    "bias": Spec(("channels",), "like weight", optional=True),
}
BACKWARD_SPECS = {**SPECS, "dout": X, "stats": Spec(("batch", "num_groups", 2), "float32")}

_forward_plans = Plans(wide=3)
_backward_plans = Plans(wide=4)


def forward(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple
) -> tuple[Array, Array | None]:
    """(out, statistics) of (x, weight, bias); statistics may be None unless needed.

    Args:
        options: num_groups, eps, activation, and whether the statistics are needed.
    """
    (x, weight, bias), (num_groups, eps, activation, need_stats) = arrays, options
    num_groups = _plain_number(function, num_groups)
    if type(eps) is not float:
        eps = require_eps(function, eps)

    def check() -> dict[str, View]:
        _check_scales(function, weight, bias)
        views = views_of(function, library, SPECS, (x, weight, bias))
        _check_groups(function, views["x"], num_groups)
        require_eps(function, eps)
        return views

    if library.on_cpu(x):
        strides = dense_like(check()["x"])
        values, *scales = _numpy_arrays(library, x, weight, bias)
        out, stats = reference.group_norm(values, num_groups, *scales, eps, activation)
        return library.from_numpy(out, x, strides), library.from_numpy(stats)
    again = lambda x, weight, bias, need_stats: forward(  # noqa: E731
        function, library, (x, weight, bias), (num_groups, eps, activation, need_stats)
    )
    options = (num_groups, eps, activation)
    key, pointers = _forward_plans.key(library, arrays, options)
    plan = _forward_plans.get(key)
    if plan is None:
        views = check()
        plan = _forward_detour(library, views, again)
        plan = plan or ForwardPlan(function, library, views, key[-1], *options)
        _forward_plans.add(key, plan)
    if type(plan) is Detour:
        return plan(x, weight, bias, need_stats)
    return plan(x, pointers, need_stats)


def backward(
    function: str, library: Any, arrays: tuple[Array | None, ...], options: tuple
) -> tuple[Array, Array | None, Array | None]:
    """(dx, dweight, dbias) of (dout, x, weight, bias, stats); without a weight two are None.

    Args:
        options: the activation.
    """
    (dout, x, weight, bias, stats), (activation,) = arrays, options

    def check() -> dict[str, View]:
        _check_scales(function, weight, bias)
        views = views_of(function, library, BACKWARD_SPECS, (x, weight, bias, dout, stats))
        _check_groups(function, views["x"], views["stats"].shape[1])
        return views

    if library.on_cpu(x):
        strides = dense_like(check()["x"])
        inputs = _numpy_arrays(library, x, weight, bias)
        dout, stats = library.to_numpy(dout), library.to_numpy(stats)
        dx, dweight, dbias = reference.group_norm_backward(dout, *inputs, stats, activation)
        dx = library.from_numpy(dx, x, strides)
        if weight is None:
            return dx, None, None
        return dx, library.from_numpy(dweight, weight), library.from_numpy(dbias, bias)
    again = lambda *arrays: backward(function, library, arrays, (activation,))  # noqa: E731
    key, pointers = _backward_plans.key(library, arrays, activation)
    plan = _backward_plans.get(key)
    if plan is None:
        views = check()
        plan = _backward_detour(library, views, again)
        plan = plan or BackwardPlan(function, library, views, key[-1], activation)
        _backward_plans.add(key, plan)
    if type(plan) is Detour:
        return plan(*arrays)
    return plan(x, weight, bias, pointers)


def _plain_number(function: str, num_groups: Any) -> int:
    """The number of groups as a plain one: it is part of the key of a plan."""
    if type(num_groups) is not int:
        if not isinstance(num_groups, numbers.Integral) or isinstance(num_groups, bool):
            fact = "num_groups must be an integer that divides the number of channels"
            raise ValueError(f"{function}: {fact}, got {num_groups!r}")
        num_groups = operator.index(num_groups)
    return num_groups


def _numpy_arrays(
    library: Any, x: Array, weight: Array | None, bias: Array | None
) -> list[numpy.ndarray]:
    """x, weight and bias; without a weight what changes nothing."""
    x = library.to_numpy(x)
    if weight is None:
        return [x, numpy.ones(x.shape[1], x.dtype), numpy.zeros(x.shape[1], x.dtype)]
    return [x, library.to_numpy(weight), library.to_numpy(bias)]


def _check_scales(function: str, weight: Array | None, bias: Array | None) -> None:
    if (weight is None) != (bias is None):
        name, other = ("weight", "bias") if weight is None else ("bias", "weight")
        raise TypeError(f"{function}: {name} must be an array where {other} is one, got None")


def _check_groups(function: str, x: View, num_groups: int) -> None:
    if num_groups < 1 or x.shape[1] % num_groups or not x.shape[1]:
        fact = "num_groups must divide the number of channels"
        raise ValueError(f"{function}: {fact}, got {num_groups} and {x.shape[1]}")


def _forward_detour(library: Any, views: Mapping[str, View], forward: Callable) -> Detour | None:
    """A plan that copies a tensor whose positions have gaps, or makes weights that are None.

    Args:
        forward: makes the same call with (x, weight, bias, need_stats).

    Returns:
        None where the kernels take the arrays as they are.
    """
    x = views["x"]
    gaps, strides = layout_of(x) is None, dense_like(x)
    if "weight" in views and not gaps:
        return None

    def call(x: Array, weight: Array, bias: Array, need_stats: bool) -> tuple:
        if weight is None:
            weight, bias = (filled(library, x.shape[1], value, x) for value in (1.0, 0.0))
        return forward(dense(library, x, strides, x) if gaps else x, weight, bias, need_stats)

    return Detour(library, x.device, call)


def _backward_detour(library: Any, views: Mapping[str, View], backward: Callable) -> Detour | None:
    """The same as `_forward_detour` for calls with (dout, x, weight, bias, stats).

    A gradient in another memory format than x is copied into that of x.
    """
    x, strides = views["x"], dense_like(views["x"])
    layout = layout_of(x) or layout_of(x._replace(strides=strides))
    of_dout = layout_of(views["dout"], layout.nhwc)
    x_gaps = layout_of(x) is None
    dout_gaps = of_dout is None or of_dout.nhwc != layout.nhwc
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
