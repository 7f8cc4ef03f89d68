"""The options and the optional arrays of an attention call: names, types, and plain values.

An option is a part of the key of a plan. An array as an option would be compared by its identity
there and could change in place, so it becomes a number here, before anything is looked up.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from ...runtime import loaded
from ...runtime.array import Array, compiling
from ...runtime.checks import plain_flag, plain_integer, plain_real, short
from ...runtime.lookup import library_of
from .names import caller_name
from .score_text import Text

PRECISIONS = ("ieee", "tf32")
CAUSAL = (False, True, "bottom-right", "top-left")
LAYOUTS = ("bshd", "bhsd")  # of calls without packed sequences
UNLIMITED = 2**31 - 1  # a side of a window is not longer
# Factors of the score lie between these, so that in float32 they are neither 0 nor denormal, which
# approximate division takes for 0, and that they are finite, also times log2(e).
LEAST_FACTOR, MOST_FACTOR = 2.0**-126, 2.0**127


class Options(NamedTuple):
    """Options of a call; `plain_options` makes them hashable and of the types below."""

    causal: bool | str = False
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    layout: str = "bshd"  # or "bhsd", "thd" if packed; "thd-bshd" say, if q and k differ
    max_seqlens: tuple[int, int] | None = None  # packed: the longest query and key sequence
    dropout_p: float = 0.0
    deterministic: bool = False
    precision: str = "ieee"
    text: Text | None = None  # of the caller's score and mask, whose captures follow the extras

    def layout_of(self, name: str) -> str:
        """The layout of one of the tensors, or of its gradient."""
        layout_q, _, layout_k = self.layout.partition("-")
        return layout_k if layout_k and name.removeprefix("d") in ("k", "v") else layout_q


class Extras(NamedTuple):
    """Optional arrays, None where there is none, in the order in which the kernels take them."""

    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    alibi_slopes: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None
    dropout_seed: Array | int | None = None
    seqused_q: Array | None = None
    seqused_k: Array | None = None
    key_mask: Array | None = None  # kernels take it in the place of the bias: see key_mask.py


NO_EXTRAS = Extras()


class Gradients(NamedTuple):
    """Results of a backward pass, like q, k, v, bias and sinks; None of what is not asked for."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None = None
    dsinks: Array | None = None


class Rule(NamedTuple):
    """One option: the values that it takes.

    Attributes:
        schema: its type in the torch operators, with "?" if it may be None.
        plain: of (function, name, value), the plain value; it raises TypeError where there is none.
        allowed: the range of a number, in words.
        valid: whether a number is in that range.
    """

    schema: str
    plain: Callable[[str, str, Any], Any]
    allowed: str = ""
    valid: Callable[[float], bool] | None = None


def _causal(function: str, name: str, x: Any) -> bool | str:
    allowed = "False, True, 'bottom-right' or 'top-left'"
    return x if isinstance(x, str) else plain_flag(function, name, x, allowed)


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


def _layout(function: str, name: str, x: Any) -> str:
    if not isinstance(x, str):
        raise TypeError(f"{function}: {name} must be 'bshd' or 'bhsd', got {x!r}")
    return str(x)


def _max_seqlens(function: str, name: str, lengths: Any) -> tuple[int, int]:
    names = (caller_name(function, side) for side in ("max_seqlen_q", "max_seqlen_k"))
    return tuple(plain_integer(function, *x) for x in zip(names, lengths, strict=True))


def _precision(function: str, name: str, x: Any) -> str:
    if not isinstance(x, str):
        raise TypeError(f"{function}: {name} must be 'ieee' or 'tf32', got {short(x)}")
    return str(x)


def _is_factor(x: float) -> bool:
    return LEAST_FACTOR <= x <= MOST_FACTOR


_FACTOR = "positive and from 2^-126 to 2^127 (normal in float32)"

RULES = {
    "causal": Rule("str", _causal),
    "scale": Rule("float?", plain_real, _FACTOR, _is_factor),
    "window": Rule("SymInt[]?", _window),
    "softcap": Rule("float", plain_real, f"0, or {_FACTOR}", lambda x: x == 0 or _is_factor(x)),
    "layout": Rule("str", _layout),
    "max_seqlens": Rule("SymInt[]?", _max_seqlens),
    "dropout_p": Rule("float", plain_real, "at least 0 and less than 1", lambda x: 0 <= x < 1),
    "deterministic": Rule("bool", plain_flag),
    "precision": Rule("str", _precision, "'ieee' or 'tf32'", lambda x: x in PRECISIONS),
}
MAX_SEQLENS, DROPOUT_P, DETERMINISTIC, TEXT = map(
    Options._fields.index, ("max_seqlens", "dropout_p", "deterministic", "text")
)
SLOPES, BIAS, SINKS, DROPOUT_SEED, SEQUSED_K, KEY_MASK = map(
    Extras._fields.index,
    ("alibi_slopes", "bias", "sinks", "dropout_seed", "seqused_k", "key_mask"),
)


def plain_options(
    function: str,
    *,
    causal: Any = False,
    scale: Any = None,
    window: Any = None,
    softcap: Any = 0.0,
    layout: Any = "bshd",
    max_seqlens: Any = None,
    dropout_p: Any = 0.0,
    deterministic: Any = False,
    precision: Any = "ieee",
) -> tuple:
    """The fields of `Options` but the text, as numbers, strings and tuples of these, of any range.

    NumPy scalars and arrays of no dimensions in the host's memory (NumPy, torch) are read.

    Raises:
        TypeError: an option of another type; one on a GPU, as reading it would wait for the GPU.
        NotImplementedError: one that wants a gradient.
    """
    options = (
        causal, scale, window, softcap, layout, max_seqlens, dropout_p, deterministic, precision,
    )  # fmt: skip
    if (
        type(causal) in (bool, str)
        and (scale is None or type(scale) is float)
        and (window is None or _is_plain_window(window))
        and (type(softcap) is float or _is_zero(softcap))
        and type(layout) is str
        and (max_seqlens is None or _is_plain_pair(max_seqlens))
        and (type(dropout_p) is float or _is_zero(dropout_p))
        and type(deterministic) is bool
        and type(precision) is str
    ):
        return options  # as nearly every call has them; 0.3 µs
    if compiling():  # numbers may be symbols; the operator checks when it runs
        for name, x in zip(RULES, options, strict=True):
            if isinstance(x, (numpy.ndarray, numpy.generic, loaded.torch.Tensor)):
                fact = f"{caller_name(function, name)} must be a Python number under torch.compile"
                raise TypeError(f"{function}: {fact} (use x.item()), got an array")
        return options
    return tuple(
        None
        if x is None and rule.schema.endswith("?")
        else rule.plain(function, caller_name(function, name), x)
        for (name, rule), x in zip(RULES.items(), options, strict=True)
    )


def _is_zero(x: Any) -> bool:
    return type(x) is int and x == 0


def _is_plain_pair(x: Any) -> bool:
    return type(x) is tuple and len(x) == 2 and type(x[0]) is type(x[1]) is int


def _is_plain_window(x: Any) -> bool:
    if type(x) is not tuple or len(x) != 2 or compiling():  # symbols cannot be compared
        return False
    first, second = x
    return (first is None or (type(first) is int and first < UNLIMITED)) and (
        second is None or (type(second) is int and second < UNLIMITED)
    )


# The torch operators take these arguments after the tensors, and at their end the newest option:
# Inductor keeps graphs on disk by the names of operators, so new arguments have a default.
ARGUMENTS = ", ".join(
    [f"Tensor? {name}" for name in Extras._fields]
    + ["str function", *(f"{rule.schema} {name}" for name, rule in RULES.items())][:-1]
)
NEWEST_ARGUMENT = "str precision='ieee'"
NUM_EXTRAS, NUM_ARGUMENTS = len(Extras._fields), len(ARGUMENTS.split(", "))


def text_of(options: tuple) -> Text | None:
    """The text of plain options, which are one longer if there is one."""
    return options[TEXT] if len(options) > TEXT else None


def encode(options: tuple) -> tuple:
    """`Options` in types that a torch operator takes; older Dynamos do not trace `_replace`."""
    causal, scale, window, softcap, layout, lengths, *others = options[:TEXT]
    causal = {False: "", True: "bottom-right"}.get(causal, str(causal))
    window = None if window is None else [-1 if x is None else x for x in window]
    lengths = None if lengths is None else list(lengths)
    return (causal, scale, window, softcap, layout, lengths, *others)


def decode(arguments: tuple) -> tuple[str, tuple, Options]:
    """(function, optional arrays, options) of an operator's arguments behind the tensors.

    Without optional arrays there is an empty tuple, with which a call takes less time.
    """
    extras, function = arguments[:NUM_EXTRAS], arguments[NUM_EXTRAS]
    extras = extras if any(x is not None for x in extras) else ()
    causal, scale, window, softcap, layout, lengths, *others = arguments[NUM_EXTRAS + 1 :]
    window = None if window is None else tuple(window)
    lengths = None if lengths is None else tuple(lengths)
    options = Options(causal or False, scale, window, softcap, layout, lengths, *others)
    return function, extras, options
