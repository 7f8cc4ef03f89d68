"""Norms, projections and diffusion for ``cupyflash check``, and how such an operation is described.

Each is computed as a user would, on shapes of real models, and compared as the tests do: with
float64, an error being allowed twice that of the same formula in the same dtype, plus rounding
(:mod:`cupyflash.testing`). Tokens are compared one by one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy

import cupyflash

from ..ops.diffusion import reference
from ..ops.linear.options import Arrays, Options
from ..runtime.philox import dropout_scale, dropout_threshold, keep_rows
from ..testing import (
    EPSILON,
    Comparison,
    Expected,
    Result,
    cast,
    expected_group_norm,
    expected_norm,
    expected_projection,
    numpy_dtype,
    to_library,
    to_numpy64,
)

EPS = 1e-5  # eps of the norms
SEED = 2**40 + 1  # seed of dropout


class Check(Protocol):
    """The right results by name."""

    def compare(self, **results: Any) -> list[Comparison]:
        """Comparisons of these results."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """A call that is verified and timed.

    Attributes:
        name: "fwd", "bwd" or "step", and the backend of attention.
        call: of no argument; returns one array, or several in the order of ``results``.
        results: their names.
        work: FLOPs, or bytes that are read and written at least.
        unit: of the work, "FLOP" or "B".
    """

    name: str
    call: Callable[[], Any]
    results: tuple[str, ...]
    work: float
    unit: str

    def compute(self) -> dict[str, Any]:
        """The results by name."""
        found = self.call()
        arrays = found if isinstance(found, tuple) else (found,)
        return dict(zip(self.results, arrays, strict=True))


@dataclasses.dataclass(frozen=True)
class Operation:
    """A problem: its passes and right results; ``shape`` is a text."""

    name: str
    dtype: str
    shape: str
    passes: tuple[Pass, ...]
    exact: Check


class Maker:
    """Seeded arrays of "numpy" or "cupy"."""

    def __init__(self, library: str) -> None:
        self.library = library
        self._rng = numpy.random.default_rng(0)

    def normal(self, dtype: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Any:
        """Normal random numbers."""
        values = scale * self._rng.standard_normal(shape, "float32") + mean
        return cast(values.astype("float32"), dtype, self.library)

    def vector(self, dtype: str, size: int) -> Any:
        """The weight of a norm."""
        return self.normal(dtype, size, scale=0.2, mean=1.0)

    def matrix(self, dtype: str, rows: int, columns: int) -> Any:
        """Weights whose products are about as large as what is multiplied."""
        return self.normal(dtype, rows, columns, scale=columns**-0.5)

    def integers(self, values: Any) -> Any:
        """int32."""
        return to_library(numpy.asarray(values, "int32"), self.library)


def rms_norm(make: Maker, dtype: str, rows: int, columns: int, dropout_p: float = 0.0) -> Operation:
    """RMSNorm with a residual, and its gradient coming in."""
    threshold = dropout_threshold(dropout_p)
    kept = keep_rows(SEED, threshold, range(rows), columns)
    factors = kept * dropout_scale(threshold) if dropout_p else None
    options = {"dropout_p": dropout_p, "dropout_seed": SEED}
    dout, x, residual, dresidual = (make.normal(dtype, rows, columns) for _ in range(4))
    weight = make.vector(dtype, columns)
    exact = expected_norm(
        True, dout, x, weight, None, residual, dresidual, eps=EPS, factors=factors
    )
    forward = functools.partial(
        cupyflash.rms_norm, x, weight, residual=residual, eps=EPS, return_stats=True, **options
    )
    _, h, stats = forward()
    backward = functools.partial(
        cupyflash.rms_norm_backward, dout, h, weight, stats, dresidual=dresidual, **options
    )
    gradients = ("dx", "dweight", "dh") if dropout_p else ("dx", "dweight")
    copies = 2 if dropout_p else 0  # arrays like x that the kernel of dropout moves as well
    passes = (
        _norm_pass("fwd", forward, ("out", "h", "stats"), x, 4 + copies // 2),
        _norm_pass("bwd", backward, gradients, x, 4 + copies),
    )
    text = f"{rows} × {columns}, " + ("dropout" if dropout_p else "residual")
    return Operation("RMSNorm", dtype, text, passes, exact)


def layer_norm(make: Maker, dtype: str, rows: int, columns: int) -> Operation:
    """LayerNorm without a residual."""
    dout, x = (make.normal(dtype, rows, columns) for _ in range(2))
    weight, bias = make.vector(dtype, columns), make.normal(dtype, columns)
    exact = expected_norm(False, dout, x, weight, bias, eps=EPS)
    options = {"eps": EPS, "return_stats": True}
    forward = functools.partial(cupyflash.layer_norm, x, weight, bias, **options)
    backward = functools.partial(cupyflash.layer_norm_backward, dout, x, weight, forward()[1])
    passes = (
        _norm_pass("fwd", forward, ("out", "stats"), x, 2),
        _norm_pass("bwd", backward, ("dx", "dweight", "dbias"), x, 3),
    )
    return Operation("LayerNorm", dtype, f"{rows} × {columns}", passes, exact)


def group_norm(
    make: Maker, dtype: str, shape: tuple[int, int, int, int], activation: str, layout: str
) -> Operation:
    """GroupNorm of images (N, C, H, W), which lie in memory as ``layout``, "NCHW" or "NHWC"."""
    groups = 32
    dout, x = (make.normal(dtype, *shape) for _ in range(2))
    if layout == "NHWC":
        dout, x = (y.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2) for y in (dout, x))
    weight, bias = make.vector(dtype, shape[1]), make.normal(dtype, shape[1])
    exact = expected_group_norm(dout, x, groups, weight, bias, activation, EPS)
    options = {"eps": EPS, "activation": activation, "return_stats": True}
    forward = functools.partial(cupyflash.group_norm, x, groups, weight, bias, **options)
    arrays = dout, x, weight, bias, forward()[1]
    backward = functools.partial(cupyflash.group_norm_backward, *arrays, activation=activation)
    passes = (
        _norm_pass("fwd", forward, ("out", "stats"), x, 2),
        _norm_pass("bwd", backward, ("dx", "dweight", "dbias"), x, 3),
    )
    text = f"{'×'.join(map(str, shape))} {layout}"
    return Operation(f"GroupNorm {activation}", dtype, text, passes, exact)


def _norm_pass(
    name: str, call: Callable[[], Any], results: tuple[str, ...], x: Any, arrays: int
) -> Pass:
    """A pass that reads or writes this number of arrays like x."""
    return Pass(name, call, results, float(arrays * x.nbytes), "B")


def linear(make: Maker, dtype: str, rows: int, d_in: int, d_out: int) -> Operation:
    """A linear layer with bias, GELU and residual."""
    x, weight = make.normal(dtype, rows, d_in), make.matrix(dtype, d_out, d_in)
    bias, residual = make.normal(dtype, d_out), make.normal(dtype, rows, d_out)
    arrays = Arrays(x, weight, bias=bias, residual=residual)
    exact = expected_projection(arrays, Options(activation="gelu"))
    options = {"activation": "gelu", "residual": residual}
    call = functools.partial(cupyflash.linear, x, weight, bias, **options)
    forward = Pass("fwd", call, ("out",), 2.0 * rows * d_in * d_out, "FLOP")
    return Operation("linear, GELU", dtype, f"{rows} × {d_in}→{d_out}", (forward,), exact)


def mlp(make: Maker, dtype: str, rows: int, width: int, hidden: int, gated: bool) -> Operation:
    """An MLP after an RMSNorm, with a residual; gated it is SwiGLU."""
    x, up = make.normal(dtype, rows, width), make.matrix(dtype, hidden, width)
    gate = make.matrix(dtype, hidden, width) if gated else None
    down, weight = make.matrix(dtype, width, hidden), make.vector(dtype, width)
    activation = "silu" if gated else "gelu_tanh"
    options = Options(activation=activation, eps=EPS, rms=True)
    arrays = Arrays(x, up, gate_weight=gate, norm_weight=weight)
    exact = expected_projection(arrays, options, Arrays(None, down, residual=x))
    norm = cupyflash.Norm(weight, eps=EPS, rms=True)
    options = {"gate_weight": gate, "activation": activation, "residual": x, "norm": norm}
    call = functools.partial(cupyflash.mlp, x, up, down, **options)
    flops = 2.0 * rows * width * hidden * (3 if gated else 2)
    forward = Pass("fwd", call, ("out",), flops, "FLOP")
    name = f"mlp, {'SwiGLU' if gated else 'GELU'}"
    return Operation(name, dtype, f"{rows} × {width}→{hidden}", (forward,), exact)


def qkv_projection(
    make: Maker, dtype: str, tokens: int, heads: tuple[int, int], head_dim: int
) -> Operation:
    """q, k and v after an RMSNorm, with the rotary embedding; ``heads`` of q and of k."""
    width, columns = heads[0] * head_dim, (heads[0] + 2 * heads[1]) * head_dim
    x, weight = make.normal(dtype, 1, tokens, width), make.matrix(dtype, columns, width)
    scale = make.vector(dtype, width)
    cos, sin = (make.normal("float32", tokens, head_dim // 2) for _ in range(2))
    arrays = Arrays(x, weight, norm_weight=scale, cos=cos, sin=sin)
    joined = expected_projection(arrays, Options(eps=EPS, rms=True, heads=heads)).results["out"]
    parts, first = {}, 0
    for name, count in zip("qkv", (heads[0], heads[1], heads[1])):
        part = slice(first, first + count * head_dim)
        shape = (1, tokens, count, head_dim)
        exact, yardstick = (y[..., part].reshape(shape) for y in joined[:2])
        parts[name] = joined._replace(exact=exact, yardstick=yardstick)
        first = part.stop
    norm, rotary = cupyflash.Norm(scale, eps=EPS, rms=True), cupyflash.Rotary(cos, sin)
    options = {"heads_q": heads[0], "heads_kv": heads[1], "norm": norm, "rotary": rotary}
    call = functools.partial(cupyflash.qkv_projection, x, weight, **options)
    forward = Pass("fwd", call, ("q", "k", "v"), 2.0 * tokens * width * columns, "FLOP")
    text = f"{tokens} × {width}, {heads[0]}/{heads[1]}×{head_dim}"
    return Operation("qkv, rotary", dtype, text, (forward,), Expected(parts))


def diffusion(make: Maker, dtype: str, shape: tuple[int, ...]) -> Operation:
    """A step of DDPM whose noise is drawn in the kernel."""
    sampler = cupyflash.DiffusionSampler.ddpm(cupyflash.beta_schedule("cosine", 100))
    x, predicted = make.normal(dtype, *shape), make.normal(dtype, *shape)
    number, seed, results = 40, 7, []
    for values in (to_numpy64, lambda y: to_numpy64(y).astype(numpy_dtype(dtype))):
        arrays = values(x), values(predicted), None, numpy.asarray(number)
        strides = range(x.ndim, 0, -1)
        results.append(reference.step(sampler.coefficients, *arrays, seed, 1.0, strides))
    to_x0, of_model, *others, sigma = numpy.abs(sampler.coefficients[number])
    of_x = max(float(numpy.abs(to_numpy64(y)).max()) for y in (x, predicted))
    # The kernel draws the noise with sin.approx and cos.approx, which are right to 2^-20.9, and
    # radii end at 5.8.
    of_noise = 6 * 2.0**-20 / EPSILON["float32"]
    terms = of_x * (others[0] * (to_x0 + of_model) + sum(others[1:])) + sigma * of_noise
    exact = Expected({"out": Result(*results, dtype, terms)})
    call = functools.partial(sampler.step, x, predicted, number, seed=seed, clip=1.0)
    step = Pass("step", call, ("out",), 3.0 * x.nbytes, "B")
    return Operation("DDPM", dtype, "×".join(map(str, shape)), (step,), exact)
