"""Options of an attention call: plain Python values, whatever the caller had for numbers.

The options are a part of the key of a plan. An array as an option would be compared by its identity
there and could change in place, so it becomes a number here, before anything is looked up.
"""

from typing import Any, NamedTuple

from ..runtime.array import compiling, library_of
from ..runtime.checks import plain_flag, plain_integer, plain_real, short
from .names import caller_name

UNLIMITED = 2**31 - 1  # a side of a window is not longer


class Options(NamedTuple):
    """Options of a call; `plain_options` makes them hashable and of the types below."""

    causal: bool | str
    scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float
    layout: str  # "bshd", "bhsd", "thd" if packed; of q and k, "thd-bshd" say, if they differ
    max_seqlens: tuple[int, int] | None = None  # packed: the longest query and key sequence
    dropout_p: float = 0.0

    def layout_of(self, name: str) -> str:
        """The layout of one of the tensors, or of its gradient."""
        layout_q, _, layout_k = self.layout.partition("-")
        return layout_k if layout_k and name.removeprefix("d") in ("k", "v") else layout_q


def plain_options(function: str, options: tuple) -> tuple:
    """The fields of `Options` as Python numbers, strings and tuples of these, of any range.

    NumPy scalars and arrays of no dimensions in the host's memory (NumPy, torch) are read.

    Raises:
        TypeError: an option of another type; one on a GPU, as reading it would wait for the GPU.
        NotImplementedError: one that wants a gradient.
    """
    causal, scale, window, softcap, layout, max_seqlens, dropout_p = options
    if (
        type(causal) in (bool, str)
        and (scale is None or type(scale) is float)
        and (window is None or _is_plain_pair(window))
        and (type(softcap) is float or _is_zero(softcap))
        and type(layout) is str
        and (max_seqlens is None or (_is_plain_pair(max_seqlens) and None not in max_seqlens))
        and (type(dropout_p) is float or _is_zero(dropout_p))
    ):
        return options  # as nearly every call has them; 0.3 µs
    if compiling():  # numbers may be symbols; the operator checks when it runs
        return options
    name = lambda x: caller_name(function, x)  # noqa: E731
    if not isinstance(causal, str):
        allowed = "False, True, 'bottom-right' or 'top-left'"
        causal = plain_flag(function, name("causal"), causal, allowed)
    if not isinstance(layout, str):
        raise TypeError(f"{function}: layout must be 'bshd' or 'bhsd', got {layout!r}")
    if max_seqlens is not None:
        lengths = zip(("max_seqlen_q", "max_seqlen_k"), max_seqlens, strict=True)
        max_seqlens = tuple(plain_integer(function, name(which), x) for which, x in lengths)
    return (
        causal,
        None if scale is None else plain_real(function, name("scale"), scale),
        None if window is None else _window(function, name("window"), window),
        plain_real(function, name("softcap"), softcap),
        str(layout),
        max_seqlens,
        plain_real(function, name("dropout_p"), dropout_p),
    )


def _is_plain_pair(x: Any) -> bool:
    if type(x) is not tuple or len(x) != 2:
        return False
    first, second = x
    return (first is None or (type(first) is int and first < UNLIMITED)) and (
        second is None or (type(second) is int and second < UNLIMITED)
    )


def _is_zero(x: Any) -> bool:
    return type(x) is int and x == 0


def _window(function: str, name: str, window: Any) -> tuple[int | None, int | None]:
    """(left, right) of a tuple, list or array of two."""
    sides = window
    if (
        not isinstance(window, tuple | list)
        and library_of(window) is not None
        and len(window.shape) == 1
    ):
        sides = tuple(window)
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        allowed = "None or (left, right), each at least 0, or None or -1 for unlimited"
        raise TypeError(f"{function}: {name} must be {allowed}, got {short(window)}")
    each = f"each side of {name}"
    sides = (None if x is None else plain_integer(function, each, x) for x in sides)
    return tuple(None if x is None else min(x, UNLIMITED) for x in sides)
