"""Projections from arrays to plans; a call of known signature is one look-up."""

from typing import Any, NamedTuple

from .. import environment
from ..runtime.array import Array, dense_strides
from ..runtime.operation import Operation, Plans, TorchSide
from . import reference
from .checks import check
from .kernels import ACTIVATIONS
from .plan import LinearPlan
from .reference import Arrays, Options


class Down(NamedTuple):
    """The second projection of an MLP."""

    weight: Array | None = None
    bias: Array | None = None
    residual: Array | None = None


NO_DOWN = Down()
_plans = Plans(wide=len(Arrays._fields) + len(Down._fields))


def activation_name(function: str, activation: str | None) -> str:
    """As the kernels call it.

    Raises:
        ValueError: there is none of this name.
    """
    name = "none" if activation is None else activation
    known = isinstance(name, str) and name in ACTIVATIONS
    if not known or activation == "none":
        allowed = "'gelu', 'gelu_tanh', 'silu', 'relu' or None"
        raise ValueError(f"{function}: activation must be {allowed}, got {activation!r}")
    return name


def call(function: str, arrays: Arrays, options: Options, down: Down = NO_DOWN) -> Array:
    """One projection, or the two of an MLP, on arrays of any library.

    Raises:
        TypeError: x is no array.
        NotImplementedError: transforms of torch.func, gradients of cos and sin.
    """
    return PROJECTION(function, (*arrays, *down), options)[0]


def run(
    function: str, library: Any, given: tuple[Array | None, ...], options: Options
) -> tuple[Array]:
    """A call on arrays of one library: those of `Arrays`, then those of `Down`."""
    if library.on_cpu(given[0]):
        views = check(function, library, given, options)
        *arrays, weight, bias, residual = (
            None if y is None else library.to_numpy(y) for y in given
        )
        out = reference.project(Arrays(*arrays), options)
        if "down_weight" in views:
            second = Arrays(out, weight, bias=bias, residual=residual)
            out = reference.project(second, Options())
        return (library.from_numpy(out, given[0], dense_strides(out.shape, range(out.ndim))),)
    settings = environment.current()
    plan, pointers = _plans.find(
        library,
        given,
        (options, settings.backend),
        lambda: check(function, library, given, options),
        lambda views, aligned: LinearPlan(
            function, library, views, options, aligned, settings.backend
        ),
        anew=settings.debug,
    )
    return (plan(given, pointers),)


def _torch_side() -> TorchSide:
    from . import torch_call

    return torch_call


PROJECTION = Operation(run, _torch_side)
