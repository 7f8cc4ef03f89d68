"""The layers of GPT-2: the cache of keys and values, attention with it, and the blocks.

Tokens become logits in three ways, the modes that are compared:

=======  ==================================================================================
naive    attention with the scores in memory, every operation by itself
flash    flash attention, every operation by itself
fused    flash attention; norms, biases, activation and residuals in the projections
=======  ==================================================================================

A function that computes attention is called with a layer and its q, k, v of the new tokens, stores
k and v in the cache, and returns the attention of q, like it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import cupyflash
from cupyflash.ops.decode.cache_append import cache_append
from cupyflash.ops.decode.cached_attention import attention_with_cache
from cupyflash.ops.decode.embedding import embedding

from ...ops.block.block import BlockWeights
from ...runtime.array import Array, array_namespace
from .config import Gpt2Config
from .weights import Weights

MODES = ("naive", "flash", "fused")
Attention = Callable[[int, Array, Array, Array], Array]


class KvCache:
    """Keys and values of all layers, (layers, batch, max_length, heads, head_dim) each.

    Past the end of a sequence lies whatever an earlier one left, which may be NaN.
    """

    def __init__(
        self, config: Gpt2Config, xp: Any, dtype: Any, batch: int, max_length: int
    ) -> None:
        shape = (config.layers, batch, max_length, config.heads, config.head_dim)
        self.k, self.v = xp.zeros(shape, dtype), xp.zeros(shape, dtype)
        self.batch, self.max_length = batch, max_length

    @property
    def nbytes(self) -> int:
        """Memory of both."""
        return self.k.nbytes + self.v.nbytes

    def append(
        self, layer: int, k: Array, v: Array, positions: Array, sequences: Array | None = None
    ) -> None:
        """k, v (…, heads, head_dim) of new tokens; see `cache_append`."""
        shape = (-1, *self.k.shape[3:])
        k, v = k.reshape(shape), v.reshape(shape)
        cache_append(k, v, self.k[layer], self.v[layer], positions, sequences)


class PromptAttention:
    """Attention of prompts from their beginning; also holds their tokens on the device.

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
        return array_namespace(q).concatenate(outs)


class TokenAttention:
    """Attention of one new token of each sequence, (batch, 1, heads, head_dim), at ``positions``.

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
    xp = array_namespace(q)
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


def hidden_states(
    config: Gpt2Config,
    weights: Weights,
    mode: str,
    tokens: Array,
    positions: Array,
    attention: Attention,
) -> Array:
    """The result of the last block, before the final norm.

    Args:
        tokens: int32, (batch, seqlen) or (total,).
        positions: like tokens.
        attention: of a layer, see `PromptAttention`.
    """
    x = embedding(tokens, weights.token_embedding, positions, weights.position_embedding)
    block = fused_block if mode == "fused" else plain_block
    for layer, of_block in enumerate(weights.blocks):
        x = block(config, of_block, x, functools.partial(attention, layer))
    return x


def fused_block(config: Gpt2Config, w: BlockWeights, x: Array, attention: Callable) -> Array:
    """A block as four launches beside those of attention."""
    norms = [
        cupyflash.Norm(weight, bias, config.eps)
        for weight, bias in ((w.ln1_weight, w.ln1_bias), (w.ln2_weight, w.ln2_bias))
    ]
    qkv = cupyflash.qkv_projection(x, w.qkv_weight, w.qkv_bias, heads_q=config.heads, norm=norms[0])
    x = cupyflash.linear(attention(*qkv).reshape(x.shape), w.proj_weight, w.proj_bias, residual=x)
    return cupyflash.mlp(
        x,
        w.up_weight,
        w.down_weight,
        w.up_bias,
        w.down_bias,
        activation="gelu_tanh",
        residual=x,
        norm=norms[1],
    )


def plain_block(config: Gpt2Config, w: BlockWeights, x: Array, attention: Callable) -> Array:
    """A block with every operation by itself."""
    h = cupyflash.layer_norm(x, w.ln1_weight, w.ln1_bias, eps=config.eps)
    qkv = cupyflash.qkv_projection(h, w.qkv_weight, w.qkv_bias, heads_q=config.heads)
    x = x + cupyflash.linear(attention(*qkv).reshape(x.shape), w.proj_weight, w.proj_bias)
    h = cupyflash.layer_norm(x, w.ln2_weight, w.ln2_bias, eps=config.eps)
    h = gelu_tanh(cupyflash.linear(h, w.up_weight, w.up_bias))
    return x + cupyflash.linear(h, w.down_weight, w.down_bias)


def logits(config: Gpt2Config, weights: Weights, x: Array) -> Array:
    """(rows, vocabulary) of hidden states (rows, width), in their dtype."""
    norm = cupyflash.Norm(*weights.final_norm, config.eps)
    return cupyflash.linear(x, weights.head_weight, norm=norm)


def gelu_tanh(x: Array) -> Array:
    """GELU by tanh, computed in float32, one launch."""
    return _gelu(array_namespace(x))(x).astype(x.dtype, copy=False)


@functools.cache
def _gelu(xp: Any) -> Callable[[Array], Array]:
    def gelu(x: Array) -> Array:
        wide = x.astype("float32")
        inner = 0.7978845608 * (wide + 0.044715 * wide * wide * wide)
        return (0.5 * wide * (1.0 + xp.tanh(inner))).astype(x.dtype)

    return gelu if xp is numpy else xp.fuse(gelu)
