"""The arrays of a call as `dispatch` takes them: of one library, with an array for the seed."""

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

from ...runtime.array import Array
from ...runtime.philox import is_number, seed_array
from ...runtime.specs import require_library
from .checks import EXTRAS
from .names import caller_name
from .options import DROPOUT_P, DROPOUT_SEED, NUM_EXTRAS, SLOPES, Extras, text_of

TENSORS = ("q", "k", "v")
BACKWARD_TENSORS = ("dout", "q", "k", "v", "out", "lse", "dlse")
OPTIONAL = ("dlse", *Extras._fields)


def prepared(
    function: str, library: Any, names: tuple[str, ...], arrays: tuple, options: tuple
) -> tuple[Array | None, ...]:
    """The arrays of a call, all of one library, with an array for the seed if there is dropout.

    Preparing them again changes nothing.

    Args:
        names: `TENSORS` or `BACKWARD_TENSORS`.

    Raises:
        TypeError: an array of another library, or a seed of another kind.
        ValueError: a seed out of range, or none in a backward.
        NotImplementedError: slopes that want a gradient.
    """
    given = len(arrays) - len(names)
    if given or options[DROPOUT_P]:
        arrays = with_seed(function, library, names, arrays, options)
    kind = type(arrays[names is BACKWARD_TENSORS])  # of q
    for x in arrays[: len(names) + NUM_EXTRAS]:
        if type(x) is not kind and x is not None:  # a subclass or a stranger
            check_library(function, library, names, arrays)
            break
    if not given:
        return arrays
    extras, text = arrays[len(names) :], text_of(options)
    if text is not None:
        for capture, x in zip(text.captures, extras[NUM_EXTRAS:]):
            if type(x) is not kind and not capture.is_number:
                named = {capture.name: x}
                require_library(function, library, named, caller_name(function, "q"))
    if extras and extras[SLOPES] is not None and library.wants_gradient(extras[SLOPES]):
        refuse_slopes(function)
    return arrays


def split_extras(arrays: Sequence) -> tuple[Extras, tuple]:
    """The optional arrays of a call, and the captures behind them."""
    return Extras(*arrays[:NUM_EXTRAS]), tuple(arrays[NUM_EXTRAS:])


def refuse_slopes(function: str) -> NoReturn:
    fact = "alibi_slopes have no gradient (use alibi_slopes.detach())"
    raise NotImplementedError(f"{function}: {fact}, got some that require one")


def with_seed(
    function: str, library: Any, names: tuple[str, ...], arrays: tuple, options: tuple
) -> tuple[Array | None, ...]:
    """The arrays of a call, with one for the seed if there is dropout, without seed otherwise."""
    num, dropout_p = len(names), options[DROPOUT_P]
    if not dropout_p:
        if len(arrays) == num:
            return arrays
        if text_of(options) is not None and arrays[num + DROPOUT_SEED] is None:
            return arrays  # `with_text` has filled them up
    extras, captures = Extras(*arrays[num:][:NUM_EXTRAS]), arrays[num + NUM_EXTRAS :]
    seed = extras.dropout_seed
    if seed is not None or dropout_p:
        if seed is None and "dout" in names:
            fact = "dropout_p needs the dropout_seed of the forward"
            raise ValueError(f"{function}: {fact}, got None")
        if not dropout_p and not is_number(seed):
            check_library(function, library, ("dropout_seed",), (seed,))
        seed = seed_array(function, library, arrays[names.index("q")], seed, dropout_p)
        extras = tuple(seed if i == DROPOUT_SEED else x for i, x in enumerate(extras))
    given = text_of(options) is not None or any(x is not None for x in extras)
    return (*arrays[:num], *extras, *captures) if given else arrays[:num]


def check_library(
    function: str, library: Any, names: tuple[str, ...], arrays: tuple[Array | None, ...]
) -> None:
    """Raise TypeError where an array is of another library, or is None but not optional."""
    given = {
        name: x
        for name, x in zip((*names, *Extras._fields), arrays)
        if x is not None or name not in OPTIONAL
    }
    require_library(function, library, given, "q", functools.partial(caller_name, function), EXTRAS)
