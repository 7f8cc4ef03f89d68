"""Options as plain Python numbers, whatever the caller has for numbers.

An option is part of the key of a plan. An array there would be compared by its identity and could
change in place, so it becomes a number before anything is looked up.
"""

import operator
from typing import Any

import numpy

from .array import device_name, library_of

PLAIN = (bool, int, float, str)
CPU = 1  # kDLCPU: DLPack's name of the device of an array of any library
ON_GPU = "must be a number, as reading it from a GPU would wait (use x.item())"


def host_value(function: str, name: str, x: Any) -> Any:
    """The number in a NumPy scalar or in an array of no dimensions; any other object as it is.

    Raises:
        TypeError: it lies on a GPU: reading it would wait for all work there.
        NotImplementedError: it wants a gradient.
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
    """A bool, also of NumPy, in an array of no dimensions, or as 0 or 1.

    Raises:
        As `host_value`; TypeError also for what is none of these.
    """
    if type(x) is bool:
        return x
    value = host_value(function, name, x)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{function}: {name} must be {allowed}, got {short(value)}")


def plain_real(function: str, name: str, x: Any) -> float:
    """A float of any real number but bool; its range is not checked.

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
    """An int of any integer but bool; its range is not checked.

    Raises:
        As `plain_flag`.
    """
    if type(x) is int:
        return x
    value = host_value(function, name, x)
    if hasattr(value, "__index__") and not isinstance(value, bool) and not library_of(value):
        return operator.index(value)
    raise TypeError(f"{function}: {name} must be an integer, got {short(value)}")


def short(x: Any) -> str:
    """For messages."""
    return f"an array {tuple(x.shape)}" if library_of(x) else repr(x)[:60]
