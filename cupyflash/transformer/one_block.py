"""Calls of one block: what is prepared for its weights is found by their addresses."""

from typing import Any

from ..runtime.array import Array
from ..runtime.checks import integer_within, plain_real, require_plain
from .dispatch import ENDS, Stack, block_list, weights_library

_stacks: dict[tuple, Stack] = {}  # each as long as its weights live


def block(
    function: str,
    x: Array,
    weights: Any,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    heads: int,
    eps: float,
) -> Array:
    """A stack of one block, kept by the pointers and signatures of its weights."""
    (weights,) = block_list(function, [weights])
    library = weights_library(function, [weights])
    heads = integer_within(function, "heads", heads, 1, 2**31 - 1)
    eps = plain_real(function, "eps", eps)
    make = lambda: Stack(function, [weights], dict.fromkeys(ENDS), heads, eps)  # noqa: E731
    if library.on_cpu(weights.ln1_weight):
        return make().forward(function, x, k_cache, v_cache, lengths, False)
    try:
        if library.followed(*weights) and library.what_follows(*weights):
            make()
            require_plain(function, library, weights)
        pointers = tuple(map(library.pointer, weights))
        signatures = tuple(map(library.signature, weights))
    except (AttributeError, TypeError):  # a weight of another library
        make()
        raise
    key = (type(library), pointers, signatures, heads, eps)
    stack = _stacks.get(key)
    if stack is None:
        stack = make()
        stack.hold_weakly(lambda _: _stacks.pop(key, None))
        _stacks[key] = stack
    return stack.forward(function, x, k_cache, v_cache, lengths, False)
