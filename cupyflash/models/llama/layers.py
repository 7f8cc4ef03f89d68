"""The layers of a Llama, on packed rows: from tokens to hidden states, and to logits.

A layer is a norm with the projection to q, k and v and the rotary embedding, attention, a
projection with the residual, and a norm with the gated MLP; where heads are normalised, that and
the rotary embedding are a launch of their own.

A function that computes attention is called with a layer and its q, k, v of the rows, (rows, heads,
head_dim) each, and returns the attention of q, like it.
"""

from collections.abc import Callable

import cupyflash
from cupyflash.ops.decode.embedding import embedding
from cupyflash.ops.linear.head_norm import head_norm

from ...runtime.array import Array
from ..engine import Batch, PagePool
from ..engine.attention import cached_attention, packed_attention
from .config import LlamaConfig
from .weights import LayerWeights, Weights

Attention = Callable[[int, Array, Array, Array], Array]


def hidden_states(
    config: LlamaConfig, weights: Weights, tokens: Array, positions: Array, attention: Attention
) -> Array:
    """The result of the last layer, (rows, width), before the final norm.

    Args:
        tokens: int32 (rows,).
        positions: int32 (rows,), of each row in its sequence.
    """
    x = embedding(tokens, weights.token_embedding)
    columns = config.heads * config.head_dim
    rotary = cupyflash.Rotary(weights.cos, weights.sin, positions)
    for layer, w in enumerate(weights.layers):
        qkv = project_qkv(config, w, x, rotary)
        out = attention(layer, *qkv).reshape(x.shape[0], columns)
        x = cupyflash.linear(out, w.proj_weight, w.proj_bias, residual=x)
        x = cupyflash.mlp(
            x, w.up_weight, w.down_weight, w.up_bias, w.down_bias,
            gate_weight=w.gate_weight, gate_bias=w.gate_bias, activation="silu",
            residual=x, norm=norm_of(config, w.mlp_norm),
        )  # fmt: skip
    return x


def project_qkv(
    config: LlamaConfig, w: LayerWeights, x: Array, rotary: cupyflash.Rotary
) -> tuple[Array, Array, Array]:
    """q (rows, heads, head_dim), k and v of x (rows, width); q and k rotated."""
    q, k, v = cupyflash.qkv_projection(
        x, w.qkv_weight, w.qkv_bias, heads_q=config.heads, heads_kv=config.heads_kv,
        norm=norm_of(config, w.input_norm), rotary=None if config.head_norms else rotary,
    )  # fmt: skip
    if config.head_norms:
        head_norm(q, k, w.q_norm, w.k_norm, rotary=rotary, eps=config.eps)
    return q, k, v


def logits(config: LlamaConfig, weights: Weights, x: Array) -> Array:
    """(rows, vocab_size) of hidden states (rows, width), in their dtype."""
    return cupyflash.linear(x, weights.head_weight, norm=norm_of(config, weights.final_norm))


def norm_of(config: LlamaConfig, weight: Array) -> cupyflash.Norm:
    """An RMSNorm before a projection."""
    return cupyflash.Norm(weight, None, config.eps, rms=True)


def paged_attention(config: LlamaConfig, batch: Batch, pool: PagePool) -> Attention:
    """Attention of the rows of a step, whose keys and values enter the pages of a pool."""

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        return cached_attention(batch, pool.layer(layer), q, k, v, config.window(layer))

    return attend


def whole_attention(config: LlamaConfig, cu_seqlens: Array, longest: int) -> Attention:
    """Attention of whole sequences without a cache; arguments as in `packed_attention`."""

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        return packed_attention(q, k, v, cu_seqlens, longest, config.window(layer))

    return attend
