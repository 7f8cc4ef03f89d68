"""A stack of transformer blocks in plain NumPy: the oracle of the tests, and the path on the CPU.

Blocks and attention compute in float64 for float64 arrays, else in float32. Arrays have been
checked, but for what a GPU alone knows too: a sequence that has no room left gives NaN.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from ...runtime.array import Array, compute_dtype, silent
from ..decode.reference import greedy_row
from ..norm.reference import ACTIVATIONS, norm


def exact(x: Array) -> Array:
    """No rounding; the yardstick of the tests rounds each intermediate result to a dtype."""
    return x


def embed(
    tokens: Array, lengths: Array, token_embedding: Array, position_embedding: Array
) -> Array:
    """(batch, width): embedding of the token and of its position, NaN where there is none."""
    wide = compute_dtype(token_embedding)
    known = (tokens >= 0) & (tokens < len(token_embedding))
    known &= (lengths >= 0) & (lengths < len(position_embedding))
    token, position = numpy.where(known, tokens, 0), numpy.where(known, lengths, 0)
    x = token_embedding[token].astype(wide) + position_embedding[position].astype(wide)
    return numpy.where(known[:, None], x, numpy.nan)


def stack(
    x: Array,
    blocks: Sequence[Any],
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    eps: float,
    rounded: Callable[[Array], Array] = exact,
) -> tuple[Array, Array, Array]:
    """All blocks: (x, new keys, new values), the last two (layers, batch, heads, head_dim).

    Args:
        blocks: of `BlockWeights`.
        k_cache: (layers, batch, max_length, heads, head_dim), as v_cache; only read.
        rounded: what happens to each intermediate result.
    """
    wide = compute_dtype(k_cache)
    x, new_k, new_v = x.astype(wide), [], []
    room = (lengths >= 0) & (lengths < k_cache.shape[2])
    x = numpy.where(room[:, None], x, numpy.nan)
    for weights, keys, values in zip(blocks, k_cache, v_cache):
        w = type(weights)(*(y.astype(wide) for y in weights))
        normal = rounded(norm(False, x, w.ln1_weight, w.ln1_bias, eps)[0])
        qkv = rounded(normal @ w.qkv_weight.T + w.qkv_bias)
        q, k, v = qkv.reshape(len(x), 3, *keys.shape[-2:]).swapaxes(0, 1)
        attended = rounded(_attention(q, k, v, keys, values, numpy.where(room, lengths, 0)))
        x = rounded(x + rounded(attended @ w.proj_weight.T + w.proj_bias))
        normal = rounded(norm(False, x, w.ln2_weight, w.ln2_bias, eps)[0])
        hidden = rounded(normal @ w.up_weight.T + w.up_bias)
        hidden = rounded(ACTIVATIONS["gelu_tanh"][0](hidden))
        x = rounded(x + rounded(hidden @ w.down_weight.T + w.down_bias))
        new_k.append(k)
        new_v.append(v)
    return x, numpy.stack(new_k), numpy.stack(new_v)


def head(x: Array, weight: Array, bias: Array, head_weight: Array, eps: float) -> Array:
    """Logits (batch, vocab) after the last norm."""
    wide = compute_dtype(x)
    normal, _ = norm(False, x, weight.astype(wide), bias.astype(wide), eps)
    return normal @ head_weight.astype(wide).T


def _attention(q: Array, k: Array, v: Array, keys: Array, values: Array, lengths: Array) -> Array:
    """(batch, width): each sequence attends to its cache and to its new key."""
    out = numpy.empty_like(q)
    for b, length in enumerate(lengths):
        every_k = numpy.concatenate([keys[b, :length].astype(q.dtype), k[b][None]])
        every_v = numpy.concatenate([values[b, :length].astype(q.dtype), v[b][None]])
        scores = numpy.einsum("hd,khd->hk", q[b], every_k) / math.sqrt(q.shape[-1])
        weights = numpy.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[b] = numpy.einsum("hk,khd->hd", weights, every_v)
    return out.reshape(len(q), q.shape[1] * q.shape[2])


@silent
def stack_on_cpu(
    checked: Any, x: numpy.ndarray, k_cache: Array, v_cache: Array, lengths: Array
) -> numpy.ndarray:
    """x after all blocks of a `Stack`, the new keys and values written into the caches."""
    library, shape = checked.library, checked.shape
    blocks = [type(block)(*map(library.to_numpy, block)) for block in checked.blocks]
    caches = [library.to_numpy(y) for y in (k_cache, v_cache)]
    lengths = library.to_numpy(lengths)
    out, *new = stack(x, blocks, *caches, lengths, shape.eps)
    room = (lengths >= 0) & (lengths < k_cache.shape[2]) & ~numpy.isnan(x).all(-1)
    for b in numpy.flatnonzero(room):
        for cache, values in zip((k_cache, v_cache), new):
            cache[:, b, int(lengths[b])] = library.from_numpy(numpy.ascontiguousarray(values[:, b]))
    return out.astype(x.dtype)


@silent
def logits_on_cpu(
    checked: Any, tokens: Array, k_cache: Array, v_cache: Array, lengths: Array
) -> numpy.ndarray:
    """(batch, vocab), of the token after ``tokens``."""
    library, shape = checked.library, checked.shape
    ends = {name: library.to_numpy(y) for name, y in checked.ends.items()}
    tables = (ends["token_embedding"], ends["position_embedding"])
    x = embed(library.to_numpy(tokens), library.to_numpy(lengths), *tables)
    x = stack_on_cpu(checked, x, k_cache, v_cache, lengths)
    last = (ends["final_weight"], ends["final_bias"], ends["head_weight"])
    return head(x, *last, shape.eps)


def next_on_cpu(
    checked: Any, tokens: Array, k_cache: Array, v_cache: Array, lengths: Array
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """int32 (batch,): the next tokens, -1 where there is none; and 1 where a sequence goes on."""
    logits = logits_on_cpu(checked, tokens, k_cache, v_cache, lengths)
    tokens, lengths = map(checked.library.to_numpy, (tokens, lengths))
    most = min(k_cache.shape[2], checked.shape.positions)
    known = (tokens >= 0) & (tokens < checked.shape.vocab)
    goes_on = known & (lengths >= 0) & (lengths < most)
    found = [greedy_row(row) if go else -1 for go, row in zip(goes_on, logits)]
    return numpy.array(found, "int32"), goes_on.astype("int32")
