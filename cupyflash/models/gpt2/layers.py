"""The layers of GPT-2: attention with the pages of an engine, and the blocks.

Tokens become logits in three ways, the modes that are compared:

=======  ==================================================================================
naive    attention with the scores in memory, every operation by itself
flash    flash attention, every operation by itself
fused    flash attention; norms, biases, activation and residuals in the projections
=======  ==================================================================================
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy

import cupyflash
from cupyflash.ops.decode.cache_append import cache_append
from cupyflash.ops.decode.embedding import embedding

from ...ops.block.block import BlockWeights
from ...runtime.array import Array, array_namespace
from ..engine import Batch, PagePool
from ..engine.attention import cached_attention
from .config import Gpt2Config
from .weights import Weights

MODES = ("naive", "flash", "fused")


class PagedAttention:
    """Attention of the rows of a batch with the pages of a pool, which their k and v enter first.

    Calls get a layer and q, k, v (rows, heads, head_dim), and return the attention of q, like it.
    Without a page table sequence i has the page i + 1 to itself, so the pages are a contiguous
    cache, whose keys are read where they lie.
    """

    def __init__(self, batch: Batch, pool: PagePool, naive: bool = False) -> None:
        self.batch, self.pool, self.naive = batch, pool, naive

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        batch, table, caches = self.batch, self.batch.page_table, self.pool.layer(layer)
        if table is None:
            caches = tuple(x[1 : 1 + batch.positions.shape[0]] for x in caches)
        if self.naive:
            return self._naive(q, k, v, caches)
        return cached_attention(batch, caches, q, k, v)

    def _naive(self, q: Array, k: Array, v: Array, caches: tuple[Array, Array]) -> Array:
        """The queries of each sequence in rows of their own, with padding, and its pages in one."""
        batch, xp = self.batch, array_namespace(q)
        count, rows = batch.positions.shape[0], xp.arange(q.shape[0], dtype="int32")
        starts, ends = rows, rows + 1
        if batch.cu_seqlens is not None:
            starts, ends = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
        sequences = (xp.searchsorted(starts, rows, side="right") - 1).astype("int32")
        cache_append(k, v, *caches, batch.row_positions, sequences, page_table=batch.page_table)
        if batch.page_table is not None:
            shape = (count, -1, *k.shape[1:])
            caches = [x[batch.page_table].reshape(shape) for x in caches]
        steps = xp.arange(batch.max_new, dtype="int32")
        padded = (starts[:, None] + steps).clip(max=q.shape[0] - 1)
        last = (batch.positions + ends - starts - 1)[:, None]
        last = xp.minimum(batch.positions[:, None] + steps, last)
        out = naive_attention(q[padded], *caches, last)
        return out[sequences, rows - starts[sequences]]


def naive_attention(q: Array, k: Array, v: Array, last: Array) -> Array:
    """Attention with the matrix of scores in memory, step by step: what flash attention replaces.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim).
        last: int32 (batch, queries), the last key that each query sees.

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
    scores = xp.where(columns <= last[:, None, :, None], scores, dtype.type(-numpy.inf))
    # An earlier sequence may have left infinity or NaN behind the last key, and 0 times it is NaN.
    v_heads = xp.where(columns[:, None] <= last.max(1)[:, None, None, None], v_heads, dtype.type(0))
    weights = xp.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return xp.matmul(weights, v_heads).swapaxes(1, 2).astype(q.dtype, copy=False)


def hidden_states(
    config: Gpt2Config, weights: Weights, mode: str, batch: Batch, pool: PagePool
) -> Array:
    """The result of the last block, before the final norm, (rows, width)."""
    x = embedding(
        batch.tokens, weights.token_embedding, batch.row_positions, weights.position_embedding
    )
    attention = PagedAttention(batch, pool, mode == "naive")
    block = fused_block if mode == "fused" else plain_block
    for layer, of_block in enumerate(weights.blocks):
        x = block(config, of_block, x, functools.partial(attention, layer))
    return x if batch.last is None else embedding(batch.last, x)  # a gather of rows


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
