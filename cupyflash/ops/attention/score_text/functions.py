"""The functions of a score's text, each with its value in NumPy or CuPy and its derivatives."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

LN2 = math.log(2)


class Function(NamedTuple):
    """A function of the language; the kernels have one of the same name (``text.cuh``).

    Attributes:
        value: of (xp, *arguments), the result.
        partials: of (xp, result, *arguments), the derivative by each argument.
        arity: the number of arguments.
        keeps_integers: the result for integers is an integer; else integers become floats.
    """

    value: Callable[..., Any]
    partials: tuple[Callable[..., Any], ...] = ()
    arity: int = 1
    keeps_integers: bool = False


def _erf(xp: Any, x: Any) -> Any:
    if xp is numpy:
        return numpy.vectorize(math.erf, otypes=[float])(x).astype(x.dtype)
    from cupyx.scipy import special

    return special.erf(x)


def _sigmoid(xp: Any, x: Any) -> Any:
    small = xp.exp(-abs(x))
    return xp.where(x >= 0, 1, small) / (1 + small)


FUNCTIONS = {
    "exp": Function(lambda xp, x: xp.exp(x), (lambda xp, y, x: y,)),
    "exp2": Function(lambda xp, x: xp.exp2(x), (lambda xp, y, x: y * LN2,)),
    "log": Function(lambda xp, x: xp.log(x), (lambda xp, y, x: 1 / x,)),
    "log2": Function(lambda xp, x: xp.log2(x), (lambda xp, y, x: 1 / (x * LN2),)),
    "tanh": Function(lambda xp, x: xp.tanh(x), (lambda xp, y, x: 1 - y * y,)),
    "sigmoid": Function(_sigmoid, (lambda xp, y, x: y * (1 - y),)),
    "erf": Function(_erf, (lambda xp, y, x: xp.exp(-x * x) * (2 / math.sqrt(math.pi)),)),
    "sqrt": Function(lambda xp, x: xp.sqrt(x), (lambda xp, y, x: 0.5 / y,)),
    "rsqrt": Function(lambda xp, x: 1 / xp.sqrt(x), (lambda xp, y, x: -0.5 * y / x,)),
    "sin": Function(lambda xp, x: xp.sin(x), (lambda xp, y, x: xp.cos(x),)),
    "cos": Function(lambda xp, x: xp.cos(x), (lambda xp, y, x: -xp.sin(x),)),
    "floor": Function(lambda xp, x: xp.floor(x), (lambda xp, y, x: 0 * x,)),
    "relu": Function(lambda xp, x: xp.maximum(x, 0), (lambda xp, y, x: xp.where(x > 0, 1, 0),)),
    "pow": Function(
        lambda xp, x, p: x**p,
        (  # those of torch where the base is 0
            lambda xp, y, x, p: xp.where(p == 0, 0, p * x ** (p - 1)),
            lambda xp, y, x, p: xp.where((x == 0) & (p >= 0), 0, y * xp.log(x)),
        ),
        arity=2,
    ),
    "abs": Function(lambda xp, x: abs(x), (lambda xp, y, x: xp.sign(x),), keeps_integers=True),
    # Where both are equal, the second one has the derivative.
    "min": Function(
        lambda xp, a, b: xp.minimum(a, b),
        (lambda xp, y, a, b: xp.where(a < b, 1, 0), lambda xp, y, a, b: xp.where(a < b, 0, 1)),
        arity=2,
        keeps_integers=True,
    ),
    "max": Function(
        lambda xp, a, b: xp.maximum(a, b),
        (lambda xp, y, a, b: xp.where(a > b, 1, 0), lambda xp, y, a, b: xp.where(a > b, 0, 1)),
        arity=2,
        keeps_integers=True,
    ),
    "clamp": Function(
        lambda xp, x, low, high: xp.minimum(xp.maximum(x, low), high),
        (
            lambda xp, y, x, low, high: xp.where((x > low) & (x < high), 1, 0),
            lambda xp, y, x, low, high: xp.where((x <= low) & (low < high), 1, 0),
            lambda xp, y, x, low, high: xp.where(xp.maximum(x, low) >= high, 1, 0),
        ),
        arity=3,
        keeps_integers=True,
    ),
    # Python's and torch's // and %, whose results for negative numbers are not those of C.
    "floor_div": Function(lambda xp, a, b: a // b, arity=2, keeps_integers=True),
    "mod": Function(lambda xp, a, b: a % b, arity=2, keeps_integers=True),
}
