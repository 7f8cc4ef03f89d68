"""GroupNorm from arrays to plans; a call of known signature is one look-up."""

import numbers
import operator
from collections.abc import Mapping
from typing import Any

import numpy

from ..runtime.array import Array, View
from ..runtime.checks import require_eps, require_like, require_stats, require_weights, views_of
from ..runtime.operation import Plans
from . import detour, reference
from .detour import Detour
from .group_norm_kernels import ACTIVATIONS
from .group_norm_plan import BackwardPlan, ForwardPlan
from .groups import dense_like

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
    num_groups, activation = _plain_options(function, num_groups, activation)
    if type(eps) is not float:
        eps = require_eps(function, eps)

    def check() -> dict[str, View]:
        arrays = {"x": x, "weight": weight, "bias": bias}
        views = views_of(function, library, arrays)
        _check(function, views, num_groups)
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
    plan, pointers = _forward_plans.find(
        library,
        (x, weight, bias),
        options,
        check,
        lambda views, aligned: (
            detour.group_norm_forward(library, views, again)
            or ForwardPlan(function, library, views, aligned, *options)
        ),
    )
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
    _, activation = _plain_options(function, 1, activation)

    def check() -> dict[str, View]:
        arrays = {"x": x, "dout": dout, "weight": weight, "bias": bias, "stats": stats}
        views = views_of(function, library, arrays)
        for name in ("dout", "stats"):
            if name not in views:
                raise TypeError(f"{function}: {name} must be an array, got None")
        shape = views["stats"].shape
        if len(shape) != 3:
            fact = "stats must have shape (batch, num_groups, 2)"
            raise ValueError(f"{function}: {fact}, got {shape}")
        _check(function, views, shape[1])
        require_like(function, views, "dout", "x")
        require_stats(function, views, (views["x"].shape[0], shape[1], 2))
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
    plan, pointers = _backward_plans.find(
        library,
        arrays,
        activation,
        check,
        lambda views, aligned: (
            detour.group_norm_backward(library, views, again)
            or BackwardPlan(function, library, views, aligned, activation)
        ),
    )
    if type(plan) is Detour:
        return plan(*arrays)
    return plan(x, weight, bias, pointers)


def _plain_options(function: str, num_groups: Any, activation: Any) -> tuple[int, str]:
    """The options as plain values: they are part of the key of a plan."""
    if type(num_groups) is not int:
        if not isinstance(num_groups, numbers.Integral) or isinstance(num_groups, bool):
            fact = "num_groups must be an integer that divides the number of channels"
            raise ValueError(f"{function}: {fact}, got {num_groups!r}")
        num_groups = operator.index(num_groups)
    if type(activation) is not str or activation not in ACTIVATIONS:
        allowed = "'silu', 'mish', 'gelu', 'gelu_tanh' or None"
        raise ValueError(f"{function}: activation must be {allowed}, got {activation!r}")
    return num_groups, activation


def _numpy_arrays(
    library: Any, x: Array, weight: Array | None, bias: Array | None
) -> list[numpy.ndarray]:
    """x, weight and bias; without a weight what changes nothing."""
    x = library.to_numpy(x)
    if weight is None:
        return [x, numpy.ones(x.shape[1], x.dtype), numpy.zeros(x.shape[1], x.dtype)]
    return [x, library.to_numpy(weight), library.to_numpy(bias)]


def _check(function: str, views: Mapping[str, View], num_groups: int) -> None:
    x = views["x"]
    for name, other in (("weight", "bias"), ("bias", "weight")):
        if name not in views and other in views:
            raise TypeError(f"{function}: {name} must be an array where {other} is one, got None")
    if len(x.shape) < 2:
        fact = "x must have at least two dimensions (batch, channels, ...)"
        raise ValueError(f"{function}: {fact}, got {x.shape}")
    if num_groups < 1 or x.shape[1] % num_groups or not x.shape[1]:
        fact = "num_groups must divide the number of channels"
        raise ValueError(f"{function}: {fact}, got {num_groups} and {x.shape[1]}")
    require_weights(function, views, "x", x.shape[1])
