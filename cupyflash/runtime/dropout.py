"""The probability and the seed of dropout, as attention and the norms take them."""

from typing import Any

import numpy

from .array import Array, device_name, library_of
from .plain_options import plain_real

SEEDS_END = 2**63


def require_probability(function: str, dropout_p: Any) -> float:
    """A number of at least 0 and less than 1, as a plain one.

    Raises:
        As `plain_real`; ValueError out of bounds.
    """
    dropout_p = plain_real(function, "dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        fact = "dropout_p must be at least 0 and less than 1"
        raise ValueError(f"{function}: {fact}, got {dropout_p}")
    return dropout_p


def is_number(seed: Any) -> bool:
    """Whether a seed is an integer of Python or NumPy."""
    return isinstance(seed, int | numpy.integer) and not isinstance(seed, bool)


def seed_array(
    function: str, library: Any, like: Array, seed: Any, dropout_p: float
) -> Array | None:
    """An array of the library for a seed on the device of ``like``; None without dropout.

    Args:
        seed: an integer; None, which draws one from the generator of the library; or an array,
            which is returned as it is.

    Raises:
        ValueError: an integer out of range.
    """
    if is_number(seed):
        if not 0 <= seed < SEEDS_END:
            fact = "dropout_seed must be at least 0 and less than 2**63"
            raise ValueError(f"{function}: {fact}, got {seed}")
        return library.seed(int(seed), like) if dropout_p else None
    if not dropout_p:
        return None
    return library.random_seed(like) if seed is None else seed


def require_seed_array(function: str, library: Any, first: str, like: Array, seed: Any) -> None:
    """That a seed is int64 of one element, in the library and on the device of the first array.

    Raises:
        TypeError: library, dtype.
        ValueError: shape, device.
    """
    if library_of(seed) is not library:
        got = f"{type(seed).__module__.split('.')[0]}.{type(seed).__name__}"
        got = got.removeprefix("builtins.")
        allowed = f"an integer, None or a {library.name} like {first}"
        raise TypeError(f"{function}: dropout_seed must be {allowed}, got {got}")
    view, device = library.view(seed), library.view(like).device
    if view.dtype != "int64":
        raise TypeError(f"{function}: dropout_seed must be int64, got {view.dtype}")
    if view.shape not in ((1,), ()):
        raise ValueError(f"{function}: dropout_seed must be (1,) or (), got {view.shape}")
    if view.device != device:
        fact = f"dropout_seed must be on the device of {first}"
        got = f"devices {device_name(view.device)} and {device_name(device)}"
        raise ValueError(f"{function}: {fact}, got {got}")
