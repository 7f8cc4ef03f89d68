"""The norms in plain NumPy: the oracle of the tests, and what runs where there is no GPU.

Everything is computed in float64 for float64 arrays, else in float32; results have the dtypes of
the inputs, statistics that of the computation. Nothing is checked here.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy

from ...runtime.array import Array, compute_dtype, silent
from ...runtime.philox import dropout_scale, keep_rows


@silent
def add(x: Array, residual: Array) -> Array:
    """The input of the norm, x + residual, rounded to the dtype of the residual."""
    wide = compute_dtype(residual)
    return (x.astype(wide) + residual.astype(wide)).astype(residual.dtype)


@silent
def dropout_add(x: Array, residual: Array | None, threshold: int, seed: int) -> Array:
    """The input of the norm, dropout(x) + residual, in the dtype of the residual or else of x."""
    like = x if residual is None else residual
    wide, columns = numpy.dtype(compute_dtype(like)).type, x.shape[-1]
    kept = keep_rows(seed, threshold, range(math.prod(x.shape[:-1])), columns).reshape(x.shape)
    h = numpy.where(kept, x.astype(wide) * wide(dropout_scale(threshold)), wide(0))
    return (h if residual is None else h + residual.astype(wide)).astype(like.dtype)


@silent
def norm(rms: bool, x: Array, weight: Array, bias: Array | None, eps: float) -> tuple[Array, Array]:
    """LayerNorm or RMSNorm: (out, statistics (..., 2))."""
    wide = compute_dtype(x)
    values = x.astype(wide)
    mean = numpy.zeros((*x.shape[:-1], 1), wide) if rms else values.mean(-1, keepdims=True)
    variance = numpy.square(values - mean).mean(-1, keepdims=True)
    scale = 1 / numpy.sqrt(variance + numpy.asarray(eps, wide))
    out = (values - mean) * scale * weight.astype(wide)
    if bias is not None:
        out += bias.astype(wide)
    stats = numpy.concatenate([mean, scale], -1)
    return out.astype(x.dtype), numpy.ascontiguousarray(stats)


@silent
def norm_backward(
    rms: bool,
    dout: Array,
    x: Array,
    weight: Array,
    stats: Array,
    dresidual: Array | None,
    sums: Any = "float64",
) -> tuple[Array, Array, Array]:
    """(dx, dweight, dbias) of ``norm``; the last two are sums over rows in the dtype ``sums``."""
    wide = compute_dtype(x)
    gradient, stats = dout.astype(wide), stats.astype(wide)
    scale = stats[..., 1:]
    normal = (x.astype(wide) - stats[..., :1]) * scale
    g = gradient * weight.astype(wide)
    mean = 0 if rms else g.mean(-1, keepdims=True)
    dx = scale * (g - mean - normal * (g * normal).mean(-1, keepdims=True))
    if dresidual is not None:
        dx += dresidual.astype(wide)
    rows = tuple(range(x.ndim - 1))
    dweight, dbias = sum_over(gradient * normal, rows, sums), sum_over(gradient, rows, sums)
    return dx.astype(x.dtype), dweight.astype(weight.dtype), dbias.astype(weight.dtype)


def sum_over(x: Array, axes: tuple[int, ...], dtype: Any = "float64") -> Array:
    """The sum over many rows, in float64.

    NumPy adds up pairwise only what is contiguous. Elsewhere it has one chain of additions, which
    loses a digit in float32 over thousands of rows.
    """
    return x.sum(axes, dtype=dtype)


def sigmoid(z: Array) -> Array:
    """1 / (1 + exp(-z)), without overflow."""
    return 0.5 * (1 + numpy.tanh(0.5 * z))


def _erf(z: Array) -> Array:
    # NumPy has no erf; math.erf is exact in float64.
    return numpy.vectorize(math.erf, otypes=["float64"])(z).astype(z.dtype)


def _silu_slope(z: Array) -> Array:
    s = sigmoid(z)
    return s * (1 + z * (1 - s))


def _tanh_softplus(z: Array) -> Array:
    return numpy.tanh(numpy.logaddexp(z, numpy.zeros_like(z)))


def _mish_slope(z: Array) -> Array:
    t = _tanh_softplus(z)
    return t + z * (1 - t * t) * sigmoid(z)


def _gelu(z: Array) -> Array:
    return 0.5 * z * (1 + _erf(z * math.sqrt(0.5)))


def _gelu_slope(z: Array) -> Array:
    density = numpy.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + _erf(z * math.sqrt(0.5))) + z * density


def _gelu_tanh_argument(z: Array) -> Array:
    return math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z)


def _gelu_tanh(z: Array) -> Array:
    return 0.5 * z * (1 + numpy.tanh(_gelu_tanh_argument(z)))


def _gelu_tanh_slope(z: Array) -> Array:
    z = numpy.clip(z, -20, 20)  # beyond it is 0 or 1, and z * z must not overflow
    t = numpy.tanh(_gelu_tanh_argument(z))
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * slope


# The activation functions and their derivatives.
ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "none": (lambda z: z, numpy.ones_like),
    "silu": (lambda z: z * sigmoid(z), _silu_slope),
    "mish": (lambda z: z * _tanh_softplus(z), _mish_slope),
    "gelu": (_gelu, _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "relu": (lambda z: numpy.maximum(z, 0), lambda z: 1 - (z <= 0).astype(z.dtype)),
}
