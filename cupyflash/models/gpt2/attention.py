"""Attention of a layer with its part of the cache: over prompts, and of one token a sequence.

Each is called with a layer and its q, k, v of the new tokens, stores k and v, and returns the
attention of q, like it.
"""

from collections.abc import Sequence
from typing import Any

import numpy

import cupyflash
from cupyflash.decode.cached_attention import attention_with_cache

from ...runtime.array import Array
from .cache import KvCache


class PromptAttention:
    """Of prompts from their beginning, with what else of them has to be on the device.

    Prompts of one length are (batch, length, heads, head_dim). Of several lengths they are packed,
    (total, heads, head_dim): there is no padding that could influence anything.

    Attributes:
        tokens: int32, (batch, length) or (total,).
        positions: like tokens, in their sequences.
        lengths: int32 (batch,).
        last: int32 (batch,), the row of the last token of each prompt among all rows.
    """

    def __init__(
        self, xp: Any, cache: KvCache, prompts: Sequence[Sequence[int]], naive: bool
    ) -> None:
        lengths = [len(prompt) for prompt in prompts]
        self.cache, self.naive, self.longest = cache, naive, max(lengths)
        self.packed = len(set(lengths)) > 1
        shape = (sum(lengths),) if self.packed else (len(lengths), lengths[0])
        tokens = numpy.concatenate([numpy.asarray(prompt, "int32") for prompt in prompts])
        positions = numpy.concatenate([numpy.arange(n, dtype="int32") for n in lengths])
        sequences = numpy.repeat(numpy.arange(len(lengths), dtype="int32"), lengths)
        ends = numpy.cumsum([0, *lengths], dtype="int32")
        self.ends = ends.tolist()
        self.tokens, self.positions = (xp.asarray(x).reshape(shape) for x in (tokens, positions))
        self.sequences, self.lengths = xp.asarray(sequences), xp.asarray(lengths, "int32")
        self.cu_seqlens, self.last = xp.asarray(ends), xp.asarray(ends[1:] - 1)

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        self.cache.append(layer, k, v, self.positions.reshape(-1), self.sequences)
        if self.naive:
            return self._naive(q, k, v)
        if not self.packed:
            return cupyflash.attention(q, k, v, causal=True)
        cu_seqlens, longest = self.cu_seqlens, self.longest
        return cupyflash.flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True
        )

    def _naive(self, q: Array, k: Array, v: Array) -> Array:
        if not self.packed:
            return naive_attention(q, k, v)
        parts = [slice(a, b) for a, b in zip(self.ends, self.ends[1:])]
        outs = [naive_attention(*(x[part][None] for x in (q, k, v)))[0] for part in parts]
        return namespace(q).concatenate(outs)


class TokenAttention:
    """Of one new token of each sequence, (batch, 1, heads, head_dim), at ``positions``.

    Args:
        positions: int32 (batch,), where the new tokens stand.
        ends: positions + 1.
    """

    def __init__(self, cache: KvCache, positions: Array, ends: Array, naive: bool) -> None:
        self.cache, self.positions, self.ends, self.naive = cache, positions, ends, naive

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        keys, values = self.cache.k[layer], self.cache.v[layer]
        if not self.naive:
            return attention_with_cache(q, k, v, keys, values, self.positions)
        self.cache.append(layer, k, v, self.positions)
        return naive_attention(q, keys, values, self.ends)


def naive_attention(q: Array, k: Array, v: Array, ends: Array | None = None) -> Array:
    """Attention with the matrix of scores in memory, step by step: what flash attention replaces.

    Args:
        ends: int32 (batch,), how many keys each sequence has; None is causal.

    Raises:
        NotImplementedError: bfloat16 on a GPU, of which CuPy has no matrix product.
    """
    xp = namespace(q)
    on_gpu = xp is not numpy
    if on_gpu and q.dtype.name == "bfloat16":
        raise NotImplementedError("Gpt2: naive attention needs float16 or float32, got bfloat16")
    dtype = q.dtype if on_gpu else numpy.dtype("float32")
    q_heads, k_heads, v_heads = (x.swapaxes(1, 2).astype(dtype, copy=False) for x in (q, k, v))
    scale = dtype.type(q.shape[-1] ** -0.5)
    scores = xp.matmul(q_heads * scale, k_heads.swapaxes(-1, -2))
    columns = xp.arange(k.shape[1], dtype="int32")
    last = columns[:, None] if ends is None else ends[:, None, None, None] - 1
    scores = xp.where(columns <= last, scores, dtype.type(-numpy.inf))
    if ends is not None:  # 0 times what an earlier sequence left there may be NaN
        v_heads = xp.where(columns[:, None] <= last, v_heads, dtype.type(0))
    weights = xp.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return xp.matmul(weights, v_heads).swapaxes(1, 2).astype(q.dtype, copy=False)


def namespace(x: Array) -> Any:
    """NumPy or CuPy."""
    if isinstance(x, numpy.ndarray):
        return numpy
    import cupy

    return cupy
