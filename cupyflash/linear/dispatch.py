"""Projections from arrays to plans; a call of known signature is one look-up."""

from typing import Any, NamedTuple

from .. import environment
from ..runtime.array import Array, compiling, dense_strides, library_of
from ..runtime.checks import known_library
from ..runtime.plan import Plans
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
    if compiling():
        from . import torch_call

        return torch_call.call(function, arrays, options, down, traced=True)
    given, library = (*arrays, *down), library_of(arrays.x)
    if library is None:
        if arrays.x is None:
            raise TypeError(f"{function}: x must be an array, got None")
        of_known = lambda *known: (  # noqa: E731
            run(function, library_of(known[0]), known, options),
        )
        return known_library(function, of_known, *given)[0]
    if library.watched(*given) or library.wants_gradient(
        *[y for y in given if y is not None and library_of(y) is library]
    ):
        from . import torch_call

        return torch_call.call(function, arrays, options, down, library.traced(*given))
    return run(function, library, given, options)


def run(function: str, library: Any, given: tuple[Array | None, ...], options: Options) -> Array:
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
        return library.from_numpy(out, given[0], dense_strides(out.shape, range(out.ndim)))
    settings = environment.current()
    plan, pointers = _plans.find(
        library,
        given,
        (options, settings.family),
        lambda: check(function, library, given, options),
        lambda views, aligned: LinearPlan(
            function, library, views, options, aligned, settings.family
        ),
        anew=settings.debug,
    )
    return plan(given, pointers)
