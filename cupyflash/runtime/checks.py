"""Checks of options, before anything is launched; `specs` has those of arrays.

The checks turn options into plain Python numbers, because an option is part of the key of a plan:
an array in the key would be compared by its identity, and could be changed in place.
"""

import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy

from .array import Array, device_name
from .lookup import library_of

PACKAGE = __name__.partition(".")[0] + "."
MAX_BLOCKS = 2**31  # a grid has fewer blocks than this
PLAIN = (bool, int, float, str)
# The positive numbers of float32, in which structs hold what is a float here.
LEAST_FLOAT32, MOST_FLOAT32 = 2.0**-149, 2.0**128 - 2.0**104
CPU = 1  # kDLCPU, the CPU in the numbering of devices by DLPack
ON_GPU = "must be a number, as reading it from a GPU would wait (use x.item())"


def host_value(function: str, name: str, x: Any) -> Any:
    """The number in a NumPy scalar or in an array of no dimensions; any other object as it is.

    Raises:
        TypeError: it lies on a GPU, and reading it would wait for all work there.
        NotImplementedError: it requires or records a gradient.
    """
    if type(x) in PLAIN:
        return x
    if isinstance(x, numpy.generic):
        return x.item()
    library = library_of(x)
    if library is None:
        if hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) != CPU:
            raise TypeError(f"{function}: {name} {ON_GPU}, got a {type(x).__name__}")
        return x
    if library.wants_gradient(x) or library.replaced(x):
        fact = f"{name} has no gradient, allowed are numbers and x.detach()"
        raise NotImplementedError(f"{function}: {fact}, got an array that requires or records one")
    view = library.view(x)
    if view.shape != ():
        return x
    if view.device != -1:
        got = f"an array on device {device_name(view.device)}"
        raise TypeError(f"{function}: {name} {ON_GPU}, got {got}")
    return x.item()


def plain_flag(function: str, name: str, x: Any, allowed: str = "True or False") -> bool:
    """The bool in ``x``, which may also be NumPy's, in an array of no dimensions, or 0 or 1.

    Raises:
        As `host_value`; TypeError also for anything else.
    """
    if type(x) is bool:
        return x
    value = host_value(function, name, x)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{function}: {name} must be {allowed}, got {short(value)}")


def plain_real(function: str, name: str, x: Any) -> float:
    """The float of any real number except a bool; its range is not checked.

    Raises:
        As `plain_flag`.
    """
    if type(x) is float:
        return x
    value = host_value(function, name, x)
    if hasattr(value, "__float__") and not isinstance(value, bool) and not library_of(value):
        try:
            return float(value)
        except (OverflowError, ValueError):
            pass
    raise TypeError(f"{function}: {name} must be a number, got {short(value)}")


def plain_integer(function: str, name: str, x: Any) -> int:
    """The int of any integer except a bool; its range is not checked.

    Raises:
        As `plain_flag`.
    """
    if type(x) is int:
        return x
    value = host_value(function, name, x)
    if hasattr(value, "__index__") and not isinstance(value, bool) and not library_of(value):
        return operator.index(value)
    raise TypeError(f"{function}: {name} must be an integer, got {short(value)}")


def activation_name(function: str, activation: Any, names: Sequence[str]) -> str:
    """The name by which the kernels call an activation function, "none" for None.

    Args:
        names: those that the kernels know, "none" the first.

    Raises:
        ValueError: there is none of this name.
    """
    if activation is None:
        return names[0]
    if not isinstance(activation, str) or activation not in names[1:]:
        allowed = ", ".join(map(repr, names[1:]))
        got = short(activation)
        raise ValueError(f"{function}: activation must be {allowed} or None, got {got}")
    return activation


def short(x: Any) -> str:
    """A short text for ``x`` in messages."""
    return f"an array {tuple(x.shape)}" if library_of(x) else repr(x)[:60]


def callers_level() -> int:
    """The ``stacklevel`` of a warning that names the line of the user who called the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals["__name__"].startswith((PACKAGE, "torch.")):
        frame, level = frame.f_back, level + 1
    return level


def require_plain(function: str, library: Any, arrays: Sequence[Array]) -> None:
    """Raises NotImplementedError if torch tracks what is done to one of these arrays."""
    if got := library.what_follows(*arrays):
        raise NotImplementedError(f"{function}: has no backward and runs as it is, got {got}")


def integer_within(function: str, name: str, x: Any, least: int, most: int) -> int:
    """``x`` as a Python integer from ``least`` to ``most``.

    Raises:
        As `plain_integer`; ValueError if it is out of bounds.
    """
    number = plain_integer(function, name, x)
    if not least <= number <= most:
        raise ValueError(f"{function}: {name} must be from {least} to {most}, got {number}")
    return number


def require_eps(function: str, eps: Any) -> float:
    """``eps`` as a plain number: 0, or one that float32 has as a positive and finite one.

    Raises:
        As `plain_real`; ValueError if it is out of bounds.
    """
    eps = plain_real(function, "eps", eps)
    if eps != 0 and not LEAST_FLOAT32 <= eps <= MOST_FLOAT32:
        fact = "eps must be 0, or positive and finite in float32"
        raise ValueError(f"{function}: {fact}, got {eps!r}")
    return eps


def require_grid(function: str, blocks: int, shape: tuple[int, ...]) -> int:
    """The number of blocks; ValueError if a grid cannot have as many."""
    if blocks >= MAX_BLOCKS:
        raise ValueError(f"{function}: x is too large for a grid of {MAX_BLOCKS}, got {shape}")
    return blocks


def is_integer(x: Any) -> bool:
    """Whether ``x`` can be an index. A bool is not, nor an array, which may lie on a GPU."""
    return hasattr(x, "__index__") and not isinstance(x, bool) and not hasattr(x, "__dlpack__")
