"""Pre-norm transformer blocks for one token a sequence in plain NumPy: the oracle of the tests.

Everything is computed in float64 for float64 arrays, else in float32; nothing is checked here but
what a GPU alone knows too: where a sequence has no room left, or a token is none, results are NaN.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from ..norm.reference import ACTIVATIONS, norm
from ..runtime.array import Array, compute_dtype


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
