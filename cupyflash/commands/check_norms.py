"""The norms that ``cupyflash check`` verifies, forward and backward."""

from collections.abc import Callable
from typing import Any

import cupyflash

from ..testing import expected_group_norm, expected_norm
from .check_problem import EPS, Maker, Operation, Pass


def rms_norm(make: Maker, dtype: str, rows: int, columns: int) -> Operation:
    """With a residual, and its gradient coming in."""
    dout, x, residual, dresidual = (make.normal(dtype, rows, columns) for _ in range(4))
    weight = make.vector(dtype, columns)

    def forward() -> tuple[Any, ...]:
        return cupyflash.rms_norm(x, weight, residual=residual, eps=EPS, return_stats=True)

    _, h, stats = forward()

    def backward() -> tuple[Any, ...]:
        return cupyflash.rms_norm_backward(dout, h, weight, stats, dresidual=dresidual)

    exact = expected_norm(True, dout, x, weight, None, residual, dresidual, eps=EPS)
    passes = (
        _pass("fwd", forward, ("out", "h", "stats"), 4 * x.nbytes),
        _pass("bwd", backward, ("dx", "dweight"), 4 * x.nbytes),
    )
    return Operation("RMSNorm", dtype, f"{rows} × {columns}, residual", passes, exact)


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
