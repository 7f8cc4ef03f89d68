"""The blocks of GPT-2, from embedded tokens to logits, in the three ways that are compared.

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
from cupyflash.decode.embedding import embedding

from ...decode.block import BlockWeights
from ...runtime.array import Array
from .attention import namespace
from .config import Gpt2Config
from .weights import Weights

MODES = ("naive", "flash", "fused")
Attention = Callable[[int, Array, Array, Array], Array]


def hidden_states(
    config: Gpt2Config,
    weights: Weights,
    mode: str,
    tokens: Array,
    positions: Array,
    attention: Attention,
) -> Array:
    """What the last block returns, before the final norm.

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
    return _gelu(namespace(x))(x).astype(x.dtype, copy=False)


@functools.cache
def _gelu(xp: Any) -> Callable[[Array], Array]:
    def gelu(x: Array) -> Array:
        wide = x.astype("float32")
        inner = 0.7978845608 * (wide + 0.044715 * wide * wide * wide)
        return (0.5 * wide * (1.0 + xp.tanh(inner))).astype(x.dtype)

    return gelu if xp is numpy else xp.fuse(gelu)
