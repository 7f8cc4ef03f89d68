"""The norms that ``cupyflash check`` verifies, forward and backward."""

from collections.abc import Callable
from typing import Any

import cupyflash

from ..runtime.philox import dropout_scale, dropout_threshold, keep_rows
from ..testing import expected_group_norm, expected_norm
from .check_problem import EPS, Maker, Operation, Pass

SEED = 2**40 + 1  # of dropout


def rms_norm(make: Maker, dtype: str, rows: int, columns: int, dropout_p: float = 0.0) -> Operation:
    """With a residual, and its gradient coming in."""
    threshold = dropout_threshold(dropout_p)
    kept = keep_rows(SEED, threshold, range(rows), columns)
    factors = kept * dropout_scale(threshold) if dropout_p else None
    options = {"dropout_p": dropout_p, "dropout_seed": SEED}
    dout, x, residual, dresidual = (make.normal(dtype, rows, columns) for _ in range(4))
    weight = make.vector(dtype, columns)

    def forward() -> tuple[Any, ...]:
        return cupyflash.rms_norm(
            x, weight, residual=residual, eps=EPS, return_stats=True, **options
        )

    _, h, stats = forward()

    def backward() -> tuple[Any, ...]:
        arrays = (dout, h, weight, stats)
        return cupyflash.rms_norm_backward(*arrays, dresidual=dresidual, **options)

    exact = expected_norm(
        True, dout, x, weight, None, residual, dresidual, eps=EPS, factors=factors
    )
    gradients = ("dx", "dweight", "dh") if dropout_p else ("dx", "dweight")
    copies = 2 if dropout_p else 0  # of x, that the kernel of dropout moves besides
    passes = (
        _pass("fwd", forward, ("out", "h", "stats"), (4 + copies // 2) * x.nbytes),
        _pass("bwd", backward, gradients, (4 + copies) * x.nbytes),
    )
    text = f"{rows} × {columns}, " + ("dropout" if dropout_p else "residual")
    return Operation("RMSNorm", dtype, text, passes, exact)


def layer_norm(make: Maker, dtype: str, rows: int, columns: int) -> Operation:
    """Without a residual."""
    dout, x = (make.normal(dtype, rows, columns) for _ in range(2))
    weight, bias = make.vector(dtype, columns), make.normal(dtype, columns)

    def forward() -> tuple[Any, ...]:
        return cupyflash.layer_norm(x, weight, bias, eps=EPS, return_stats=True)

    _, stats = forward()

    def backward() -> tuple[Any, ...]:
        return cupyflash.layer_norm_backward(dout, x, weight, stats)

    exact = expected_norm(False, dout, x, weight, bias, eps=EPS)
    passes = (
        _pass("fwd", forward, ("out", "stats"), 2 * x.nbytes),
        _pass("bwd", backward, ("dx", "dweight", "dbias"), 3 * x.nbytes),
    )
    return Operation("LayerNorm", dtype, f"{rows} × {columns}", passes, exact)


def group_norm(
    make: Maker, dtype: str, shape: tuple[int, int, int, int], activation: str, layout: str
) -> Operation:
    """Of images (N, C, H, W) that lie in memory as ``layout`` says, "NCHW" or "NHWC"."""
    groups = 32
    dout, x = (make.normal(dtype, *shape) for _ in range(2))
    if layout == "NHWC":
        dout, x = (y.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2) for y in (dout, x))
    weight, bias = make.vector(dtype, shape[1]), make.normal(dtype, shape[1])

    def forward() -> tuple[Any, ...]:
        options = {"eps": EPS, "activation": activation, "return_stats": True}
        return cupyflash.group_norm(x, groups, weight, bias, **options)

    _, stats = forward()

    def backward() -> tuple[Any, ...]:
        arrays = (dout, x, weight, bias, stats)
        return cupyflash.group_norm_backward(*arrays, activation=activation)

    exact = expected_group_norm(dout, x, groups, weight, bias, activation, EPS)
    passes = (
        _pass("fwd", forward, ("out", "stats"), 2 * x.nbytes),
        _pass("bwd", backward, ("dx", "dweight", "dbias"), 3 * x.nbytes),
    )
    text = f"{'×'.join(map(str, shape))} {layout}"
    return Operation(f"GroupNorm {activation}", dtype, text, passes, exact)


def _pass(
    name: str, call: Callable[[], tuple[Any, ...]], results: tuple[str, ...], moved: int
) -> Pass:
    return Pass(name, call, results, float(moved), "B")
