"""The steps that ``cupyflash check`` verifies: of decoding, of sampling, of diffusion."""

import dataclasses
from typing import Any

import numpy

import cupyflash

from ..decode.reference import sample_row
from ..decode.sampling import Sampling, sample
from ..diffusion import reference
from ..testing import (
    EPSILON,
    Expected,
    Result,
    cast,
    expected,
    expected_stack,
    make_inputs,
    numpy_dtype,
    to_numpy64,
)
from .check_problem import Maker, Operation, Pass


def decode(
    make: Maker, dtype: str, heads: tuple[int, int], head_dim: int, used: tuple[int, ...]
) -> Operation:
    """A new token for each sequence; ``used`` are its places in the cache."""
    shape = {"heads_q": heads[0], "heads_kv": heads[1], "head_dim": head_dim}
    x = make_inputs(
        make.library, dtype, batch=len(used), seqlen_q=1, seqlen_k=max(used) + 1, **shape
    )
    caches, new = [], []
    for values in map(to_numpy64, (x.k, x.v)):
        tokens = numpy.stack([values[b, place][None] for b, place in enumerate(used)])
        for b, place in enumerate(used):
            values[b, place:] = numpy.nan  # the new token is not there yet
        for made, array in ((new, tokens), (caches, values)):
            made.append(cast(array.astype("float32"), dtype, make.library))
    positions = make.integers(used)

    def call() -> tuple[Any, ...]:
        return (cupyflash.attention_with_cache(x.q, *new, *caches, positions),)

    found = []
    for b, place in enumerate(used):
        q, dout, k, v = (y[b : b + 1] for y in (x.q, x.dout, x.k, x.v))
        one = dataclasses.replace(x, q=q, dout=dout, k=k[:, : place + 1], v=v[:, : place + 1])
        found.append(expected(one, causal=True))
    exacts, yardsticks, _, terms, _ = zip(*(y.results["out"] for y in found))
    joined = (numpy.concatenate([*map(to_numpy64, y)]) for y in (exacts, yardsticks))
    exact = Expected({"out": Result(*joined, dtype, max(terms))})
    moved = 2.0 * sum(used) * heads[1] * head_dim * x.k.itemsize
    text = f"{len(used)} × 1:{max(used) + 1}, {heads[0]}/{heads[1]}×{head_dim}"
    step = Pass("step", call, ("out",), moved, "B")
    return Operation("decoding", dtype, text, (step,), exact)


def diffusion(make: Maker, dtype: str, shape: tuple[int, ...]) -> Operation:
    """A step of DDPM whose noise is drawn in the kernel."""
    sampler = cupyflash.DiffusionSampler.ddpm(cupyflash.beta_schedule("cosine", 100))
    x, predicted = make.normal(dtype, *shape), make.normal(dtype, *shape)
    number, seed = 40, 7

    def call() -> tuple[Any, ...]:
        return (sampler.step(x, predicted, number, seed=seed, clip=1.0),)

    results = []
    strides = range(x.ndim, 0, -1)
    for values in (to_numpy64, lambda y: to_numpy64(y).astype(numpy_dtype(dtype))):
        arrays = values(x), values(predicted), None, numpy.asarray(number)
        results.append(reference.step(sampler.coefficients, *arrays, seed, 1.0, strides))
    to_x0, of_model, *others, sigma = numpy.abs(sampler.coefficients[number])
    of_x = max(float(numpy.abs(to_numpy64(y)).max()) for y in (x, predicted))
    # Of the noise, which the kernel draws: sin.approx and cos.approx are right to 2^-20.9, and
    # radii end at 5.8.
    of_noise = 6 * 2.0**-20 / EPSILON["float32"]
    terms = of_x * (others[0] * (to_x0 + of_model) + sum(others[1:])) + sigma * of_noise
    exact = Expected({"out": Result(*results, dtype, terms)})
    step = Pass("step", call, ("out",), 3.0 * x.nbytes, "B")
    return Operation("DDPM", dtype, "×".join(map(str, shape)), (step,), exact)


def sampling(make: Maker, rows: int, vocabulary: int) -> Operation:
    """Tokens with temperature, top-k and top-p."""
    logits = make.normal("float16", rows, vocabulary, scale=3.0)
    how = Sampling(temperature=0.9, top_k=50, top_p=0.9, seed=3)

    def call() -> tuple[Any, ...]:
        out = make.integers(numpy.zeros(rows))
        sample(logits, how, out=out)
        return (out,)

    options = (numpy.float32(how.scale), how.top_k, how.part, how.seed)
    values = to_numpy64(logits).astype("float16")
    right = [sample_row(row, *options, (0, number)) for number, row in enumerate(values)]
    step = Pass("step", call, ("tokens",), float(logits.nbytes), "B")
    text = f"{rows} × {vocabulary}, top-p"
    return Operation("sampling", "float16", text, (step,), Tokens(right))


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Integers, which must be equal."""

    right: list[int]

    def check(self, tokens: Any) -> None:
        """Raise AssertionError where one differs."""
        found = [int(token) for token in tokens.tolist()]
        wrong = sum(token != right for token, right in zip(found, self.right, strict=True))
        message = f"tokens: max error {wrong} of them, allowed 0 "
        print(message)
        assert not wrong, f"{message}(got {found}, expected {self.right})"


def blocks(make: Maker, dtype: str, layers: int, heads: tuple[int, int]) -> Operation:
    """Transformer blocks for a new token of three sequences, in one launch."""
    width, used = heads[0] * heads[1], (0, 300, 511)
    weights = [_block_weights(make, dtype, width) for _ in range(layers)]
    stack = cupyflash.BlockStack(weights, heads=heads[0])
    x = make.normal(dtype, len(used), width)
    caches = [make.normal(dtype, layers, len(used), max(used) + 1, *heads) for _ in range(2)]
    lengths = make.integers(used)
    exact = expected_stack(weights, x, *caches, lengths)

    def call() -> tuple[Any, ...]:
        return (stack(x, *caches, lengths),)

    moved = float(sum(y.nbytes for block in weights for y in block))
    step = Pass("step", call, ("out",), moved, "B")
    text = f"{layers} layers, {len(used)} × {width}"
    return Operation("BlockStack", dtype, text, (step,), exact)


def _block_weights(make: Maker, dtype: str, width: int) -> cupyflash.BlockWeights:
    def bias(size: int) -> Any:
        return make.normal(dtype, size, scale=0.2)

    hidden, scale = 4 * width, make.vector
    return cupyflash.BlockWeights(
        ln1_weight=scale(dtype, width), ln1_bias=bias(width),
        qkv_weight=make.matrix(dtype, 3 * width, width), qkv_bias=bias(3 * width),
        proj_weight=make.matrix(dtype, width, width), proj_bias=bias(width),
        ln2_weight=scale(dtype, width), ln2_bias=bias(width),
        up_weight=make.matrix(dtype, hidden, width), up_bias=bias(hidden),
        down_weight=make.matrix(dtype, width, hidden), down_bias=bias(width),
    )  # fmt: skip
