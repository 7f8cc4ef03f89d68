"""GroupNorm from arrays to plans; a call of known signature is one look-up."""

from collections.abc import Mapping
from typing import Any

from ..array import Array, View
from ..checks import is_integer, require_eps, require_like, require_stats, require_weights, views_of
from ..kernel_launch import keep
from . import reference
from .group_norm_kernels import ACTIVATIONS
from .group_norm_plan import BackwardPlan, ForwardPlan
from .groups import dense_like, layout_of

_forward_plans: dict[tuple, ForwardPlan] = {}
_backward_plans: dict[tuple, BackwardPlan] = {}


def forward(
    function: str,
    library: Any,
    x: Array,
    weight: Array,
    bias: Array,
    num_groups: int,
    eps: float,
    activation: str,
    need_stats: bool,
) -> tuple[Array, Array | None]:
    """(out, statistics); statistics may be None unless needed."""

    def check() -> dict[str, View]:
        arrays = {"x": x, "weight": weight, "bias": bias}
        views = views_of(function, library, arrays)
        _check(function, views, num_groups, activation)
        require_eps(function, eps)
        return views

    if library.on_cpu(x):
        view = check()["x"]
        strides = dense_like(view, layout_of(function, "x", view))
        arrays = [library.to_numpy(y) for y in (x, weight, bias)]
        out, stats = reference.group_norm(arrays[0], num_groups, *arrays[1:], eps, activation)
        return library.from_numpy(out, x, strides), library.from_numpy(stats)
    try:
        pointer, signature = library.pointer, library.signature
        pointers = (pointer(x), pointer(weight), pointer(bias))
        signatures = (signature(x), signature(weight), signature(bias))
    except AttributeError:  # an array of another library
        check()
        raise
    aligned = (pointers[0] | pointers[1] | pointers[2]) % 16 == 0
    key = (signatures, num_groups, eps, activation, aligned)
    plan = _forward_plans.get(key)
    if plan is None:
        views = check()
        options = (int(num_groups), float(eps), activation)
        plan = ForwardPlan(function, library, views, aligned, *options)
        keep(_forward_plans, key, plan)
    return plan(x, pointers, need_stats)


def backward(
    function: str,
    library: Any,
    dout: Array,
    x: Array,
    weight: Array,
    bias: Array,
    stats: Array,
    activation: str,
) -> tuple[Array, Array, Array]:
    """(dx, dweight, dbias)."""

    def check() -> dict[str, View]:
        arrays = {"x": x, "dout": dout, "weight": weight, "bias": bias, "stats": stats}
        views = views_of(function, library, arrays)
        shape = views["stats"].shape
        if len(shape) != 3:
            fact = "stats must have shape (batch, num_groups, 2)"
            raise ValueError(f"{function}: {fact}, got {shape}")
        _check(function, views, shape[1], activation)
        require_like(function, views, "dout", "x")
        require_stats(function, views, (views["x"].shape[0], shape[1], 2))
        return views

    if library.on_cpu(x):
        view = check()["x"]
        strides = dense_like(view, layout_of(function, "x", view))
        arrays = [library.to_numpy(y) for y in (dout, x, weight, bias, stats)]
        dx, dweight, dbias = reference.group_norm_backward(*arrays, activation)
        dx = library.from_numpy(dx, x, strides)
        return dx, library.from_numpy(dweight, weight), library.from_numpy(dbias, bias)
    try:
        pointer, signature = library.pointer, library.signature
        pointers = tuple(map(pointer, (dout, x, weight, bias, stats)))
        signatures = tuple(map(signature, (dout, x, weight, bias, stats)))
    except AttributeError:
        check()
        raise
    aligned = (pointers[0] | pointers[1] | pointers[2] | pointers[3]) % 16 == 0
    key = (signatures, activation, aligned)
    plan = _backward_plans.get(key)
    if plan is None:
        plan = BackwardPlan(function, library, check(), aligned, activation)
        keep(_backward_plans, key, plan)
    return plan(x, weight, bias, pointers)


def _check(function: str, views: Mapping[str, View], num_groups: int, activation: str) -> None:
    x = views["x"]
    for name in ("weight", "bias"):
        if name not in views:
            raise TypeError(f"{function}: {name} must be an array, got None")
    if len(x.shape) < 2:
        fact = "x must have at least two dimensions (batch, channels, ...)"
        raise ValueError(f"{function}: {fact}, got {x.shape}")
    valid = is_integer(num_groups) and num_groups >= 1
    if not valid or x.shape[1] % num_groups or not x.shape[1]:
        fact = "num_groups must divide the number of channels"
        raise ValueError(f"{function}: {fact}, got {num_groups} and {x.shape[1]}")
    if activation not in ACTIVATIONS:
        allowed = "'silu', 'mish', 'gelu', 'gelu_tanh' or None"
        raise ValueError(f"{function}: activation must be {allowed}, got {activation!r}")
    require_weights(function, views, "x", x.shape[1])
    layout_of(function, "x", x)
