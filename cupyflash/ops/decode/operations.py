"""`ATTENTION`, the operation of attention with a cache, and the options of its calls."""

from typing import Any

from ...runtime.array import compiling
from ...runtime.checks import integer_within, plain_flag
from ...runtime.operation import Operation, TorchSide
from ..attention.names import caller_name
from ..attention.options import plain_options
from .cached import ARRAYS, MAX_SPLITS, CachedOptions
from .cached_checks import name_of
from .dispatch import run

MAX_TOKENS = 2**31 - 1


def plain(
    function: str,
    *,
    num_splits: Any,
    return_lse: Any,
    max_seqlen_q: Any,
    counted: bool = True,
    **options: Any,
) -> tuple[CachedOptions, int | None, bool]:
    """The options of a call as Python numbers.

    Returns:
        The options of the caller, the longest sequence, and whether keys of new tokens that are in
        the cache already are counted.
    """
    causal, scale, window, softcap, *_ = plain_options(function, **options)
    if isinstance(causal, str) and causal != "bottom-right":
        fact = f"{caller_name(function, 'causal')} must be True, 'bottom-right' or False"
        raise ValueError(f"{function}: {fact}, got {causal!r}")
    if not compiling():
        if type(num_splits) is not int or num_splits:
            num_splits = integer_within(function, "num_splits", num_splits, 0, MAX_SPLITS)
        if max_seqlen_q is not None:
            max_seqlen_q = integer_within(function, "max_seqlen_q", max_seqlen_q, 0, MAX_TOKENS)
        if return_lse is not False:
            return_lse = plain_flag(function, "return_lse", return_lse)
    found = CachedOptions(scale, causal, window, softcap, num_splits, return_lse)
    return found, max_seqlen_q, counted


def _torch_side() -> type[TorchSide]:
    from . import torch_ops

    return torch_ops.Cached


ATTENTION = Operation(run, _torch_side, native="q", names=lambda f, i: name_of(f, ARRAYS[i]))
