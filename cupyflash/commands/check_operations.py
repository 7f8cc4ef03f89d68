"""The operations beside attention that ``cupyflash check`` verifies and times.

Each is computed as a user would, on shapes of real models, and compared as the tests do: with
float64, an error being allowed twice that of the same formula in the same dtype, plus rounding
(:mod:`cupyflash.testing`). Tokens are compared one by one.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy

import cupyflash

from ..decode.sampling import Sampling, sample
from ..decode.sampling_reference import sample_row
from ..diffusion import reference as diffusion
from ..linear.reference import Arrays, Options
from ..testing import (
    ExpectedNorm,
    cast,
    expected,
    expected_group_norm,
    expected_norm,
    expected_projection,
    expected_stack,
    make_inputs,
    numpy_dtype,
    to_library,
    to_numpy64,
)
from ..testing.same_precision import EPSILON

EPS = 1e-5


class Check(Protocol):
    """Knows right results by name."""

    def check(self, **results: Any) -> None:
        """Print what was compared; AssertionError where a result is wrong."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """A call that is verified and timed.

    Attributes:
        name: "fwd", "bwd" or "step".
        call: of no argument; returns the results in the order of ``results``.
        results: their names.
        work: FLOPs, or bytes that are read and written at least.
        unit: of the work, "FLOP" or "B".
    """

    name: str
    call: Callable[[], tuple[Any, ...]]
    results: tuple[str, ...]
    work: float
    unit: str


@dataclasses.dataclass(frozen=True)
class Operation:
    """A problem: its passes and what is right; ``shape`` is a text."""

    name: str
    dtype: str
    shape: str
    passes: tuple[Pass, ...]
    exact: Check


class Maker:
    """Seeded arrays of a library on its device; smaller problems where that is the CPU."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.gpu = library == "cupy"
        self._rng = numpy.random.default_rng(0)

    def normal(self, dtype: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Any:
        """Normal random numbers."""
        values = scale * self._rng.standard_normal(shape, "float32") + mean
        return cast(values.astype("float32"), dtype, self.library)

    def matrix(self, dtype: str, rows: int, columns: int) -> Any:
        """Weights whose products are about as large as what is multiplied."""
        return self.normal(dtype, rows, columns, scale=columns**-0.5)

    def integers(self, values: Any) -> Any:
        """int32."""
        return to_library(numpy.asarray(values, "int32"), self.library)


def operations(library: str, bfloat16: str) -> Iterator[tuple[str, Callable[[], Operation]]]:
    """(what it is, a function that makes it) for each; arrays are made one after the other.

    Args:
        library: "numpy" or "cupy".
        bfloat16: what stands for it, where a library lacks it.
    """
    make = Maker(library)
    size = 1 if make.gpu else 8
    for maker, *arguments in (
        (_row_norm, "RMSNorm", bfloat16, 1024 // size, 4096),
        (_row_norm, "LayerNorm", "float16", 4096 // size, 768),
        (_group_norm, "GroupNorm SiLU", "float16", (8 // size, 320, 32, 32), "first"),
        (_group_norm, "GroupNorm GELU", "float32", (8 // size, 256, 32, 32), "last"),
        (_linear, "float16", 4, 768, 3072),
        (_linear, "float16", 512 // size, 768, 3072),
        (_linear, "float32", 64, 768, 768),
        (_mlp, "float16", 4, (768, 3072), False),
        (_mlp, bfloat16, 512 // size, (1024, 2816), True),
        (_qkv, bfloat16, 2, (16, 4), 64),
        (_qkv, bfloat16, 512 // size, (16, 4), 64),
        (_decode, bfloat16, (32, 8), 128, (100, 1000)),
        (_decode, "float16", (12, 12), 64, (30000 // size, 3)),
        (_diffusion, "float16", (32 // size, 16, 1024)),
        (_diffusion, "float32", (32 // size, 16, 1024)),
        (_sampling, 8, 50257),
        (_blocks, "float16", 2, (12, 64)),
    ):
        name = " ".join(map(str, (maker.__name__.removeprefix("_"), *arguments)))
        yield name, functools.partial(maker, make, *arguments)


def _row_norm(make: Maker, name: str, dtype: str, rows: int, columns: int) -> Operation:
    rms = name.startswith("RMS")
    dout, x, residual = (make.normal(dtype, rows, columns) for _ in range(3))
    weight = make.normal(dtype, columns, scale=0.2, mean=1.0)
    bias = None if rms else make.normal(dtype, columns)
    residual, dresidual = (residual, make.normal(dtype, rows, columns)) if rms else (None, None)
    if rms:
        forward = lambda: cupyflash.rms_norm(  # noqa: E731
            x, weight, residual=residual, eps=EPS, return_stats=True
        )
        h, stats = forward()[1:]
        backward = lambda: cupyflash.rms_norm_backward(  # noqa: E731
            dout, h, weight, stats, dresidual=dresidual
        )
        names = ("out", "h", "stats"), ("dx", "dweight")
    else:
        forward = lambda: cupyflash.layer_norm(  # noqa: E731
            x, weight, bias, eps=EPS, return_stats=True
        )
        stats = forward()[1]
        backward = lambda: cupyflash.layer_norm_backward(dout, x, weight, stats)  # noqa: E731
        names = ("out", "stats"), ("dx", "dweight", "dbias")
    exact = expected_norm(rms, dout, x, weight, bias, residual, dresidual, eps=EPS)
    tensors = (4, 4) if rms else (2, 3)
    passes = _forward_and_backward((forward, backward), names, [x.nbytes * n for n in tensors])
    shape = f"{rows} × {columns}" + (", residual" if rms else "")
    return Operation(name, dtype, shape, passes, exact)


def _group_norm(
    make: Maker, name: str, dtype: str, shape: tuple[int, int, int, int], layout: str
) -> Operation:
    activation, groups = name.rpartition(" ")[2].lower(), 32
    dout, x = (make.normal(dtype, *shape) for _ in range(2))
    if layout == "last":
        dout, x = (y.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2) for y in (dout, x))
    weight = make.normal(dtype, shape[1], scale=0.2, mean=1.0)
    bias = make.normal(dtype, shape[1])
    forward = lambda: cupyflash.group_norm(  # noqa: E731
        x, groups, weight, bias, eps=EPS, activation=activation, return_stats=True
    )
    stats = forward()[1]
    backward = lambda: cupyflash.group_norm_backward(  # noqa: E731
        dout, x, weight, bias, stats, activation=activation
    )
    exact = expected_group_norm(dout, x, groups, weight, bias, activation, EPS)
    names = ("out", "stats"), ("dx", "dweight", "dbias")
    passes = _forward_and_backward((forward, backward), names, (2 * x.nbytes, 3 * x.nbytes))
    text = f"{'×'.join(map(str, shape))} {'NCHW' if layout == 'first' else 'NHWC'}"
    return Operation(name, dtype, text, passes, exact)


def _forward_and_backward(
    calls: tuple[Callable, Callable], names: tuple[tuple[str, ...], ...], bytes_moved: Any
) -> tuple[Pass, Pass]:
    return tuple(
        Pass(name, call, results, moved, "B")
        for name, call, results, moved in zip(("fwd", "bwd"), calls, names, bytes_moved)
    )


def _linear(make: Maker, dtype: str, rows: int, d_in: int, d_out: int) -> Operation:
    x, weight = make.normal(dtype, rows, d_in), make.matrix(dtype, d_out, d_in)
    bias, residual = make.normal(dtype, d_out), make.normal(dtype, rows, d_out)
    call = lambda: (  # noqa: E731
        cupyflash.linear(x, weight, bias, activation="gelu", residual=residual),
    )
    arrays = Arrays(x, weight, bias=bias, residual=residual)
    exact = expected_projection(arrays, Options(activation="gelu"))
    forward = Pass("fwd", call, ("out",), 2.0 * rows * d_in * d_out, "FLOP")
    return Operation("linear, GELU", dtype, f"{rows} × {d_in}→{d_out}", (forward,), exact)


def _mlp(make: Maker, dtype: str, rows: int, sizes: tuple[int, int], gated: bool) -> Operation:
    width, hidden = sizes
    x, up = make.normal(dtype, rows, width), make.matrix(dtype, hidden, width)
    gate = make.matrix(dtype, hidden, width) if gated else None
    down, weight = make.matrix(dtype, width, hidden), make.normal(dtype, width, scale=0.2, mean=1)
    activation = "silu" if gated else "gelu_tanh"
    call = lambda: (  # noqa: E731
        cupyflash.mlp(
            x, up, down, gate_weight=gate, activation=activation, residual=x,
            norm=cupyflash.Norm(weight, eps=EPS, rms=True),
        ),
    )  # fmt: skip
    options = Options(activation=activation, eps=EPS, rms=True)
    arrays = Arrays(x, up, gate_weight=gate, norm_weight=weight)
    exact = expected_projection(arrays, options, Arrays(None, down, residual=x))
    flops = 2.0 * rows * width * hidden * (3 if gated else 2)
    name = "mlp, " + ("SwiGLU" if gated else "GELU")
    forward = Pass("fwd", call, ("out",), flops, "FLOP")
    return Operation(name, dtype, f"{rows} × {width}→{hidden}", (forward,), exact)


def _qkv(make: Maker, dtype: str, tokens: int, heads: tuple[int, int], head_dim: int) -> Operation:
    width, columns = heads[0] * head_dim, (heads[0] + 2 * heads[1]) * head_dim
    x, weight = make.normal(dtype, 1, tokens, width), make.matrix(dtype, columns, width)
    scale = make.normal(dtype, width, scale=0.2, mean=1.0)
    cos, sin = (make.normal("float32", tokens, head_dim // 2) for _ in range(2))
    call = lambda: cupyflash.qkv_projection(  # noqa: E731
        x, weight, heads_q=heads[0], heads_kv=heads[1],
        norm=cupyflash.Norm(scale, eps=EPS, rms=True), rotary=cupyflash.Rotary(cos, sin),
    )  # fmt: skip
    arrays = Arrays(x, weight, norm_weight=scale, cos=cos, sin=sin)
    options = Options(eps=EPS, rms=True, heads=heads)
    ((exact, baseline, _, terms),) = expected_projection(arrays, options).results.values()
    parts, first = {}, 0
    for name, count in zip("qkv", (heads[0], heads[1], heads[1])):
        part = (..., slice(first, first + count * head_dim))
        shape = (1, tokens, count, head_dim)
        parts[name] = (exact[part].reshape(shape), baseline[part].reshape(shape), dtype, terms)
        first += count * head_dim
    forward = Pass("fwd", call, ("q", "k", "v"), 2.0 * tokens * width * columns, "FLOP")
    text = f"{tokens} × {width}, {heads[0]}/{heads[1]}×{head_dim}"
    return Operation("qkv, rotary", dtype, text, (forward,), ExpectedNorm(parts))


def _decode(
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
    call = lambda: (  # noqa: E731
        cupyflash.attention_with_cache(x.q, *new, *caches, positions),
    )
    found = []
    for b, place in enumerate(used):
        q, dout, k, v = (y[b : b + 1] for y in (x.q, x.dout, x.k, x.v))
        one = dataclasses.replace(x, q=q, dout=dout, k=k[:, : place + 1], v=v[:, : place + 1])
        found.append(expected(one, causal=True))
    results = [
        numpy.concatenate([to_numpy64(getattr(y, kind)["out"]) for y in found])
        for kind in ("exact", "baseline")
    ]
    exact = ExpectedNorm({"out": (*results, dtype, max(y.terms["out"] for y in found))})
    moved = 2.0 * sum(used) * heads[1] * head_dim * x.k.itemsize
    text = f"{len(used)} × 1:{max(used) + 1}, {heads[0]}/{heads[1]}×{head_dim}"
    step = Pass("step", call, ("out",), moved, "B")
    return Operation("decoding", dtype, text, (step,), exact)


def _diffusion(make: Maker, dtype: str, shape: tuple[int, ...]) -> Operation:
    sampler = cupyflash.DiffusionSampler.ddpm(cupyflash.beta_schedule("cosine", 100))
    x, predicted = make.normal(dtype, *shape), make.normal(dtype, *shape)
    number, seed = 40, 7
    call = lambda: (sampler.step(x, predicted, number, seed=seed, clip=1.0),)  # noqa: E731
    results = []
    strides = range(x.ndim, 0, -1)
    for values in (to_numpy64, lambda y: to_numpy64(y).astype(numpy_dtype(dtype))):
        arrays = values(x), values(predicted), None, numpy.asarray(number)
        results.append(diffusion.step(sampler.coefficients, *arrays, seed, 1.0, strides))
    to_x0, of_model, *others, sigma = numpy.abs(sampler.coefficients[number])
    of_x = max(float(numpy.abs(to_numpy64(y)).max()) for y in (x, predicted))
    # Of the noise, which the kernel draws: sin.approx and cos.approx are right to 2^-20.9, and
    # radii end at 5.8.
    of_noise = 6 * 2.0**-20 / EPSILON["float32"]
    terms = of_x * (others[0] * (to_x0 + of_model) + sum(others[1:])) + sigma * of_noise
    exact = ExpectedNorm({"out": (*results, dtype, terms)})
    step = Pass("step", call, ("out",), 3.0 * x.nbytes, "B")
    return Operation("DDPM", dtype, "×".join(map(str, shape)), (step,), exact)


def _sampling(make: Maker, rows: int, vocabulary: int) -> Operation:
    logits = make.normal("float16", rows, vocabulary, scale=3.0)
    sampling = Sampling(temperature=0.9, top_k=50, top_p=0.9, seed=3)

    def call() -> tuple[Any, ...]:
        out = make.integers(numpy.zeros(rows))
        sample(logits, sampling, out=out)
        return (out,)

    options = (numpy.float32(sampling.scale), sampling.top_k, sampling.part, sampling.seed)
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


def _blocks(make: Maker, dtype: str, layers: int, heads: tuple[int, int]) -> Operation:
    """Transformer blocks for a new token of three sequences, in one launch."""
    width, hidden, used = heads[0] * heads[1], 4 * heads[0] * heads[1], (0, 300, 511)
    scale, bias = {"scale": 0.2, "mean": 1.0}, {"scale": 0.2}
    blocks = [
        cupyflash.BlockWeights(
            make.normal(dtype, width, **scale), make.normal(dtype, width, **bias),
            make.matrix(dtype, 3 * width, width), make.normal(dtype, 3 * width, **bias),
            make.matrix(dtype, width, width), make.normal(dtype, width, **bias),
            make.normal(dtype, width, **scale), make.normal(dtype, width, **bias),
            make.matrix(dtype, hidden, width), make.normal(dtype, hidden, **bias),
            make.matrix(dtype, width, hidden), make.normal(dtype, width, **bias),
        )
        for _ in range(layers)
    ]  # fmt: skip
    stack = cupyflash.BlockStack(blocks, heads=heads[0])
    x = make.normal(dtype, len(used), width)
    caches = [make.normal(dtype, layers, len(used), max(used) + 1, *heads) for _ in range(2)]
    lengths = make.integers(used)
    exact = expected_stack(blocks, x, *caches, lengths)
    call = lambda: (stack(x, *caches, lengths),)  # noqa: E731
    moved = float(sum(y.nbytes for block in blocks for y in block))
    step = Pass("step", call, ("out",), moved, "B")
    text = f"{layers} layers, {len(used)} × {width}"
    return Operation("BlockStack", dtype, text, (step,), exact)
