"""Stacks of transformer blocks on the CPU: the reference on arrays that have been checked."""

from typing import Any

import numpy

from ..runtime.array import Array
from . import reference


def run(stack: Any, x: numpy.ndarray, k_cache: Array, v_cache: Array, lengths: Array) -> Any:
    """x after all blocks of a `Stack`, the new keys and values written into the caches."""
    library, shape = stack.library, stack.shape
    blocks = [type(block)(*map(library.to_numpy, block)) for block in stack.blocks]
    caches = [library.to_numpy(y) for y in (k_cache, v_cache)]
    lengths = library.to_numpy(lengths)
    out, *new = reference.stack(x, blocks, *caches, lengths, shape.eps)
    room = (lengths >= 0) & (lengths < k_cache.shape[2]) & ~numpy.isnan(x).all(-1)
    for b in numpy.flatnonzero(room):
        for cache, values in zip((k_cache, v_cache), new):
            cache[:, b, int(lengths[b])] = library.from_numpy(numpy.ascontiguousarray(values[:, b]))
    return out.astype(x.dtype)


def logits(stack: Any, tokens: Array, k_cache: Array, v_cache: Array, lengths: Array) -> Any:
    """(batch, vocab), of what follows the tokens."""
    library, shape = stack.library, stack.shape
    ends = {name: library.to_numpy(y) for name, y in stack.ends.items()}
    tables = (ends["token_embedding"], ends["position_embedding"])
    x = reference.embed(library.to_numpy(tokens), library.to_numpy(lengths), *tables)
    x = run(stack, x, k_cache, v_cache, lengths)
    last = (ends["final_weight"], ends["final_bias"], ends["head_weight"])
    return reference.head(x, *last, shape.eps)


def lost(stack: Any, tokens: Array, k_cache: Array, lengths: Array) -> numpy.ndarray:
    """Which sequences have no next token."""
    tokens, lengths = map(stack.library.to_numpy, (tokens, lengths))
    most = min(k_cache.shape[2], stack.shape.positions)
    known = (tokens >= 0) & (tokens < stack.shape.vocab)
    return ~(known & (lengths >= 0) & (lengths < most))
