"""The projections that ``cupyflash check`` verifies."""

from typing import Any

import cupyflash

from ..linear.reference import Arrays, Options
from ..testing import Expected, expected_projection
from .check_problem import EPS, Check, Maker, Operation, Pass


def linear(make: Maker, dtype: str, rows: int, d_in: int, d_out: int) -> Operation:
    """With bias, GELU and residual."""
    x, weight = make.normal(dtype, rows, d_in), make.matrix(dtype, d_out, d_in)
    bias, residual = make.normal(dtype, d_out), make.normal(dtype, rows, d_out)

    def call() -> tuple[Any, ...]:
        return (cupyflash.linear(x, weight, bias, activation="gelu", residual=residual),)

    arrays = Arrays(x, weight, bias=bias, residual=residual)
    exact = expected_projection(arrays, Options(activation="gelu"))
    forward = Pass("fwd", call, ("out",), 2.0 * rows * d_in * d_out, "FLOP")
    return Operation("linear, GELU", dtype, f"{rows} × {d_in}→{d_out}", (forward,), exact)


def mlp(make: Maker, dtype: str, rows: int, width: int, hidden: int, gated: bool) -> Operation:
    """After an RMSNorm, with a residual; gated it is SwiGLU."""
    x, up = make.normal(dtype, rows, width), make.matrix(dtype, hidden, width)
    gate = make.matrix(dtype, hidden, width) if gated else None
    down, weight = make.matrix(dtype, width, hidden), make.vector(dtype, width)
    activation = "silu" if gated else "gelu_tanh"

    def call() -> tuple[Any, ...]:
        norm = cupyflash.Norm(weight, eps=EPS, rms=True)
        options = {"gate_weight": gate, "activation": activation, "residual": x, "norm": norm}
        return (cupyflash.mlp(x, up, down, **options),)

    options = Options(activation=activation, eps=EPS, rms=True)
    arrays = Arrays(x, up, gate_weight=gate, norm_weight=weight)
    exact = expected_projection(arrays, options, Arrays(None, down, residual=x))
    flops = 2.0 * rows * width * hidden * (3 if gated else 2)
    forward = Pass("fwd", call, ("out",), flops, "FLOP")
    name = f"mlp, {'SwiGLU' if gated else 'GELU'}"
    return Operation(name, dtype, f"{rows} × {width}→{hidden}", (forward,), exact)


def qkv_projection(
    make: Maker, dtype: str, tokens: int, heads: tuple[int, int], head_dim: int
) -> Operation:
    """After an RMSNorm, with the rotary embedding; ``heads`` of q and of k."""
    width, columns = heads[0] * head_dim, (heads[0] + 2 * heads[1]) * head_dim
    x, weight = make.normal(dtype, 1, tokens, width), make.matrix(dtype, columns, width)
    scale = make.vector(dtype, width)
    cos, sin = (make.normal("float32", tokens, head_dim // 2) for _ in range(2))

    def call() -> tuple[Any, ...]:
        norm, rotary = cupyflash.Norm(scale, eps=EPS, rms=True), cupyflash.Rotary(cos, sin)
        options = {"heads_q": heads[0], "heads_kv": heads[1], "norm": norm, "rotary": rotary}
        return cupyflash.qkv_projection(x, weight, **options)

    arrays = Arrays(x, weight, norm_weight=scale, cos=cos, sin=sin)
    joined = expected_projection(arrays, Options(eps=EPS, rms=True, heads=heads))
    exact = _parts(joined, (heads[0], heads[1], heads[1]), head_dim)
    forward = Pass("fwd", call, ("q", "k", "v"), 2.0 * tokens * width * columns, "FLOP")
    text = f"{tokens} × {width}, {heads[0]}/{heads[1]}×{head_dim}"
    return Operation("qkv, rotary", dtype, text, (forward,), exact)


def _parts(joined: Expected, heads: tuple[int, int, int], head_dim: int) -> Check:
    """q, k and v of the columns of one product."""
    whole = joined.results["out"]
    parts, first = {}, 0
    for name, count in zip("qkv", heads):
        columns = slice(first, first + count * head_dim)
        exact, yardstick = (
            y[..., columns].reshape(*y.shape[:-1], count, head_dim)
            for y in (whole.exact, whole.yardstick)
        )
        parts[name] = whole._replace(exact=exact, yardstick=yardstick)
        first = columns.stop
    return Expected(parts)
