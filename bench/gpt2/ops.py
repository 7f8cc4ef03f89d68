"""The operations of a token of GPT-2, one by one: what the pictures are made of."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy

import cupyflash
from cupyflash.models.engine import Batch, PagePool
from cupyflash.models.engine.engine import PAGE_SIZE
from cupyflash.models.gpt2 import Gpt2
from cupyflash.models.gpt2.decoder import Decoder
from cupyflash.models.gpt2.layers import PagedAttention, gelu_tanh, logits
from cupyflash.ops.decode import sampling
from cupyflash.ops.decode.embedding import embedding

GROUPS = (
    "embedding", "all blocks", "norms", "projections", "attention", "MLP", "head", "sampling",
)  # fmt: skip


class Op(NamedTuple):
    """One operation: what it is part of, how often a token needs it, and its FLOPs."""

    name: str
    group: str
    call: Callable[[], Any]
    count: int
    flops: float


def token_ops(model: Gpt2, batch: int, length: int) -> Iterator[Op]:
    """The operations of a step at ``length`` tokens in the cache, in their order."""
    c, w, xp = model.config, model.weights.blocks[0], model.xp
    x = xp.ones((batch, c.width), model.dtype)
    hidden = xp.ones((batch, c.inner), model.dtype)
    qkv = cupyflash.qkv_projection(x, w.qkv_weight, w.qkv_bias, heads_q=c.heads)
    count = -(-(length + 1) // PAGE_SIZE)
    pool = PagePool(c.layers, 1 + batch * count, PAGE_SIZE, c.heads, c.head_dim, x)
    tokens, positions = xp.zeros(batch, "int32"), xp.full(batch, length, "int32")
    table = xp.arange(1, 1 + batch * count, dtype="int32").reshape(batch, count)
    step = Batch(tokens, positions, positions, table)
    attend = functools.partial(PagedAttention(step, pool, model.mode == "naive"), 0, *qkv)
    weights = model.weights
    square, wide = 2 * batch * c.width**2, 2 * batch * c.width * c.inner
    of_attention = 4 * batch * c.width * (length + 1)
    yield Op(
        "embedding", "embedding",
        lambda: embedding(
            tokens, weights.token_embedding, positions, weights.position_embedding,
        ),
        1, batch * c.width,
    )  # fmt: skip
    norms = [
        cupyflash.Norm(*pair, c.eps)
        for pair in ((w.ln1_weight, w.ln1_bias), (w.ln2_weight, w.ln2_bias))
    ]
    linear, mlp, projection = cupyflash.linear, cupyflash.mlp, cupyflash.qkv_projection
    up, down = (w.up_weight, w.up_bias), (w.down_weight, w.down_bias)
    if model.mode == "fused":
        of_layer = [
            ("norm + qkv", "projections",
             lambda: projection(x, w.qkv_weight, w.qkv_bias, heads_q=c.heads, norm=norms[0]),
             3 * square),
            ("cache + attention", "attention", attend, of_attention),
            ("projection + residual", "projections",
             lambda: linear(x, w.proj_weight, w.proj_bias, residual=x), square),
            ("norm + MLP + residual", "MLP",
             lambda: mlp(x, up[0], down[0], up[1], down[1], activation="gelu_tanh", residual=x,
                         norm=norms[1]),
             2 * wide),
        ]  # fmt: skip
    else:
        norm = lambda: cupyflash.layer_norm(x, w.ln1_weight, w.ln1_bias)  # noqa: E731
        add = lambda: x + x  # noqa: E731
        of_layer = [
            ("norm 1", "norms", norm, 8 * batch * c.width),
            ("qkv", "projections",
             lambda: projection(x, w.qkv_weight, w.qkv_bias, heads_q=c.heads), 3 * square),
            ("cache + attention", "attention", attend, of_attention),
            ("projection", "projections", lambda: linear(x, w.proj_weight, w.proj_bias), square),
            ("residual 1", "norms", add, batch * c.width),
            ("norm 2", "norms", norm, 8 * batch * c.width),
            ("up", "MLP", lambda: linear(x, *up), wide),
            ("GELU", "MLP", lambda: gelu_tanh(hidden), 8 * batch * c.inner),
            ("down", "MLP", lambda: linear(hidden, *down), wide),
            ("residual 2", "norms", add, batch * c.width),
        ]  # fmt: skip
    for name, group, call, flops in of_layer:
        yield Op(name, group, call, c.layers, flops)
    found = logits(c, weights, x)
    yield Op(
        "norm + head", "head", lambda: logits(c, weights, x), 1,
        2 * batch * c.width * c.vocabulary,
    )  # fmt: skip
    out = xp.zeros(batch, "int32")

    def sample() -> None:
        sampling.sample(found, out=out)

    yield Op("sampling", "sampling", sample, 1, batch * c.vocabulary)


def persistent_op(model: Gpt2, batch: int, length: int) -> Op:
    """A whole step as one kernel, with the choice of the largest logit."""
    c, xp = model.config, model.xp
    decoder = Decoder(model, batch, min(c.context, length + 1))
    decoder.state.positions[...] = xp.asarray([length] * batch, "int32")
    of_layer = 8 * c.width**2 + 4 * c.width * c.inner + 4 * c.width * (length + 1)
    flops = batch * (c.layers * of_layer + 2 * c.width * c.vocabulary)
    tokens, positions, _ = decoder.state
    arrays, out = (tokens, *decoder.caches, positions), xp.zeros(batch, "int32")
    step = functools.partial(model.stack.step, *arrays, out=out, advance=False)
    return Op("persistent kernel", "all blocks", step, 1, flops)


def prompt_attention(model: Gpt2, batch: int, length: int) -> Op:
    """Attention of one layer over whole prompts, with the writes to its cache."""
    c, w, xp = model.config, model.weights.blocks[0], model.xp
    decoder = Decoder(model, batch, length)
    prompts = decoder.prepare([[0] * length] * batch)
    attention = PagedAttention(prompts, decoder.pool, model.mode == "naive")
    noise = numpy.random.default_rng(0).standard_normal((batch * length, c.width), "float32")
    x = xp.asarray(noise.astype(model.dtype))
    qkv = cupyflash.qkv_projection(
        x, w.qkv_weight, w.qkv_bias, heads_q=c.heads, norm=cupyflash.Norm(w.ln1_weight, w.ln1_bias)
    )
    flops = 2 * batch * c.width * length**2  # causal
    return Op("attention", "attention", functools.partial(attention, 0, *qkv), c.layers, flops)
