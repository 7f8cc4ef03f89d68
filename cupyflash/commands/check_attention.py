"""Attention and the steps of decoding for ``cupyflash check``."""

import dataclasses
import functools
from typing import Any

import numpy

import cupyflash

from ..ops.attention import backends
from ..ops.attention.kind import Access, Features, Kind
from ..ops.decode.reference import sample_row
from ..ops.decode.sampling import Sampling, sample
from ..testing import (
    Comparison,
    Expected,
    Inputs,
    Result,
    cast,
    expected,
    expected_stack,
    make_inputs,
    make_varlen_inputs,
    to_numpy64,
)
from ..testing.problem import BACKWARD_WORK
from .check_operations import Maker, Operation, Pass

Heads = tuple[int, int]  # numbers of heads of queries and of keys


class FirstAndLastHeads:
    """Right results of attention for the first and the last group of heads.

    Float64 of all heads would take minutes.

    Args:
        batch: the number of sequences.
        packed: whether the arrays have no batch axis.
        options: of `cupyflash.attention`.
    """

    def __init__(self, x: Inputs, batch: int, heads: Heads, packed: bool, **options: Any) -> None:
        group, self.parts = heads[0] // heads[1], []
        for b, head in ((0, 0), (batch - 1, heads[1] - 1)):
            sequence, queries = slice(b, b + 1), slice(head * group, (head + 1) * group)
            of_q, of_lse = (sequence, slice(None), queries), (sequence, queries)
            of_k = (sequence, slice(None), slice(head, head + 1))
            if packed:
                of_q, of_lse, of_k = of_q[1:], of_lse[1:], of_k[1:]
            where = dict.fromkeys(("q", "dout", "out", "dq"), of_q) | {"lse": of_lse}
            where |= dict.fromkeys(("k", "v", "dk", "dv"), of_k)
            arrays = {name: getattr(x, name)[where[name]] for name in ("q", "k", "v", "dout")}
            self.parts.append((where, expected(dataclasses.replace(x, **arrays), **options)))

    def compare(self, **results: Any) -> list[Comparison]:
        """A comparison of each of these results in both groups."""
        return [
            found
            for where, exact in self.parts
            for found in exact.compare(**{name: x[where[name]] for name, x in results.items()})
        ]


def attention(
    make: Maker,
    name: str,
    dtype: str,
    heads: Heads,
    head_dim: int,
    batch: int,
    lengths: tuple[int, int],
    softcap: float = 0.0,
) -> Operation:
    """Causal attention forward and backward; ``lengths`` of the queries and of the keys."""
    seqlen_q, seqlen_k = lengths
    sizes = {"heads_q": heads[0], "heads_kv": heads[1], "head_dim": head_dim}
    x = make_inputs(make.library, dtype, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes)
    options = {"causal": True, "softcap": softcap}
    forward = functools.partial(cupyflash.attention, x.q, x.k, x.v, return_lse=True, **options)
    arrays = x.dout, x.q, x.k, x.v, *forward()
    backward = functools.partial(cupyflash.attention_backward, *arrays, **options)
    flops = _flops([lengths] * batch, heads[0], head_dim)
    labels = [kind + _backend(make, dtype, head_dim, kind == "bwd") for kind in ("fwd", "bwd")]
    passes = (
        Pass(labels[0], forward, ("out", "lse"), flops, "FLOP"),
        Pass(labels[1], backward, ("dq", "dk", "dv"), flops * BACKWARD_WORK, "FLOP"),
    )
    length = f"{seqlen_q}" if seqlen_q == seqlen_k else f"{seqlen_q}:{seqlen_k}"
    text = f"{batch} × {length}, {_heads_text(heads)}×{head_dim}"
    exact = FirstAndLastHeads(x, batch, heads, packed=False, **options)
    return Operation(name, dtype, text, passes, exact)


def packed_attention(
    make: Maker, dtype: str, heads: Heads, head_dim: int, lengths: tuple[int, ...]
) -> Operation:
    """Causal attention of packed sequences, forward."""
    sizes = {"heads_q": heads[0], "heads_kv": heads[1], "head_dim": head_dim}
    x = make_varlen_inputs(make.library, dtype, lengths, **sizes)
    arrays = x.q, x.k, x.v, x.cu_seqlens_q, x.cu_seqlens_k, max(lengths), max(lengths)

    def call() -> tuple[Any, Any]:
        return cupyflash.flash_attn_varlen_func(*arrays, causal=True, return_attn_probs=True)[:2]

    flops = _flops([(n, n) for n in lengths], heads[0], head_dim)
    label = "fwd" + _backend(make, dtype, head_dim, backward=False)
    forward = Pass(label, call, ("out", "lse"), flops, "FLOP")
    text = f"{sum(lengths)} in {len(lengths)}, {_heads_text(heads)}×{head_dim}"
    exact = FirstAndLastHeads(x, len(lengths), heads, packed=True, causal=True)
    return Operation("packed lengths", dtype, text, (forward,), exact)


def _flops(lengths: list[tuple[int, int]], heads: int, head_dim: int) -> float:
    """Floating-point operations of causal sequences of (seqlen_q, seqlen_k)."""
    pairs = 0.0
    for seqlen_q, seqlen_k in lengths:  # the last query sees all keys, the one before one less …
        rows = min(seqlen_q, seqlen_k)
        pairs += rows * (seqlen_k - rows) + rows * (rows + 1) / 2
    return 4 * pairs * heads * head_dim


def _heads_text(heads: Heads) -> str:
    return f"{heads[0]}" if heads[0] == heads[1] else f"{heads[0]}/{heads[1]}"


def _backend(make: Maker, dtype: str, head_dim: int, backward: bool) -> str:
    """The name of the backend that computes it, after a space; "" on the CPU."""
    if make.library != "cupy":
        return ""
    import cupy

    capability = divmod(int(cupy.cuda.Device().compute_capability), 10)
    kind = Kind(dtype, head_dim, Features(), capability)
    return " " + backends.choose("check", kind, Access.TENSOR_MAP, backward=backward)


def decode(
    make: Maker, dtype: str, heads: Heads, head_dim: int, used: tuple[int, ...]
) -> Operation:
    """A new token for each sequence; ``used`` are its places in the cache."""
    sizes = {"heads_q": heads[0], "heads_kv": heads[1], "head_dim": head_dim}
    sizes |= {"batch": len(used), "seqlen_q": 1, "seqlen_k": max(used) + 1}
    x = make_inputs(make.library, dtype, **sizes)
    caches, new = [], []
    for values in map(to_numpy64, (x.k, x.v)):
        tokens = numpy.stack([values[b, place][None] for b, place in enumerate(used)])
        for b, place in enumerate(used):
            values[b, place:] = numpy.nan  # the new token is not there yet
        for made, array in ((new, tokens), (caches, values)):
            made.append(cast(array.astype("float32"), dtype, make.library))
    found = []
    for b, place in enumerate(used):
        q, dout, k, v = (y[b : b + 1] for y in (x.q, x.dout, x.k, x.v))
        one = dataclasses.replace(x, q=q, dout=dout, k=k[:, : place + 1], v=v[:, : place + 1])
        found.append(expected(one, causal=True))
    exacts, yardsticks, _, terms, _ = zip(*(y.results["out"] for y in found))
    joined = (numpy.concatenate([*map(to_numpy64, y)]) for y in (exacts, yardsticks))
    exact = Expected({"out": Result(*joined, dtype, max(terms))})
    arrays = x.q, *new, *caches, make.integers(used)
    call = functools.partial(cupyflash.attention_with_cache, *arrays)
    moved = 2.0 * sum(used) * heads[1] * head_dim * x.k.itemsize
    text = f"{len(used)} × 1:{max(used) + 1}, {_heads_text(heads)}×{head_dim}"
    step = Pass("step", call, ("out",), moved, "B")
    return Operation("decoding", dtype, text, (step,), exact)


class Tokens:
    """The right tokens, with which others must be equal."""

    def __init__(self, right: list[int]) -> None:
        self.right = right

    def compare(self, tokens: Any) -> list[Comparison]:
        """The number of tokens that differ."""
        found = [int(token) for token in tokens.tolist()]
        wrong = sum(token != right for token, right in zip(found, self.right, strict=True))
        text = f"tokens: {wrong} of them differ (got {found}, expected {self.right})"
        return [Comparison(wrong, 0.0, text, text if wrong else "")]


def sampling(make: Maker, rows: int, vocabulary: int) -> Operation:
    """Tokens with temperature, top-k and top-p."""
    logits = make.normal("float16", rows, vocabulary, scale=3.0)
    how = Sampling(temperature=0.9, top_k=50, top_p=0.9, seed=3)

    def call() -> Any:
        out = make.integers(numpy.zeros(rows))
        sample(logits, how, out=out)
        return out

    options = (numpy.float32(how.scale), how.top_k, how.part, how.seed)
    values = to_numpy64(logits).astype("float16")
    right = [sample_row(row, *options, (0, number)) for number, row in enumerate(values)]
    step = Pass("step", call, ("tokens",), float(logits.nbytes), "B")
    text = f"{rows} × {vocabulary}, top-p"
    return Operation("sampling", "float16", text, (step,), Tokens(right))


def blocks(make: Maker, dtype: str, layers: int, heads: tuple[int, int]) -> Operation:
    """Transformer blocks for a new token of three sequences, in one launch; ``heads`` and dims."""
    width, used = heads[0] * heads[1], (0, 300, 511)
    weights = [_block_weights(make, dtype, width) for _ in range(layers)]
    x = make.normal(dtype, len(used), width)
    caches = [make.normal(dtype, layers, len(used), max(used) + 1, *heads) for _ in range(2)]
    lengths = make.integers(used)
    exact = expected_stack(weights, x, *caches, lengths)
    stack = cupyflash.BlockStack(weights, heads=heads[0])
    moved = float(sum(y.nbytes for block in weights for y in block))
    call = functools.partial(stack, x, *caches, lengths)
    step = Pass("step", call, ("out",), moved, "B")
    text = f"{layers} layers, {len(used)} × {width}"
    return Operation("BlockStack", dtype, text, (step,), exact)


def _block_weights(make: Maker, dtype: str, width: int) -> cupyflash.BlockWeights:
    def linear(name: str, rows: int, columns: int) -> dict[str, Any]:
        weight, bias = make.matrix(dtype, rows, columns), make.normal(dtype, rows, scale=0.2)
        return {f"{name}_weight": weight, f"{name}_bias": bias}

    def norm(name: str) -> dict[str, Any]:
        weight, bias = make.vector(dtype, width), make.normal(dtype, width, scale=0.2)
        return {f"{name}_weight": weight, f"{name}_bias": bias}

    return cupyflash.BlockWeights(
        **norm("ln1"),
        **linear("qkv", 3 * width, width),
        **linear("proj", width, width),
        **norm("ln2"),
        **linear("up", 4 * width, width),
        **linear("down", width, 4 * width),
    )
