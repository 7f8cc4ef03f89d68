"""GroupNorm in plain NumPy: the oracle of the tests, and what runs where there is no GPU.

Everything is computed in float64 for float64 arrays, else in float32; results have the dtypes of
the inputs, statistics that of the computation. Nothing is checked here.
"""

import numpy

from ...runtime.array import compute_dtype, silent
from ..norm.reference import ACTIVATIONS, sum_over

Array = numpy.ndarray


@silent
def group_norm(
    x: Array, num_groups: int, weight: Array, bias: Array, eps: float, activation: str
) -> tuple[Array, Array]:
    """GroupNorm and activation of x (batch, channels, ...): (out, statistics)."""
    wide = compute_dtype(x)
    if not x.size:
        return numpy.empty_like(x), numpy.zeros((x.shape[0], num_groups, 2), wide)
    groups = x.astype(wide).reshape(x.shape[0], num_groups, -1)
    mean = groups.mean(-1, keepdims=True)
    variance = numpy.square(groups - mean).mean(-1, keepdims=True)
    stats = numpy.concatenate([mean, 1 / numpy.sqrt(variance + numpy.asarray(eps, wide))], -1)
    stats = numpy.ascontiguousarray(stats)  # the order of its axes would be that of x
    _, z = _normalised(x, stats, weight, bias)
    return _like(ACTIVATIONS[activation][0](z), x), stats


@silent
def group_norm_backward(
    dout: Array, x: Array, weight: Array, bias: Array, stats: Array, activation: str
) -> tuple[Array, Array, Array]:
    """(dx, dweight, dbias) of ``group_norm``."""
    wide = compute_dtype(x)
    if not x.size:
        return numpy.empty_like(x), numpy.zeros_like(weight), numpy.zeros_like(bias)
    stats = stats.astype(wide)
    normal, z = _normalised(x, stats, weight, bias)
    dz = dout.astype(wide) * ACTIVATIONS[activation][1](z)
    by_group = (x.shape[0], stats.shape[1], -1)
    g = (dz * _per_channel(weight.astype(wide), x)).reshape(by_group)
    n = normal.reshape(by_group)
    means = g.mean(-1, keepdims=True), (g * n).mean(-1, keepdims=True)
    dx = (stats[..., 1:] * (g - means[0] - n * means[1])).reshape(x.shape)
    axes = (0, *range(2, x.ndim))
    dweight, dbias = sum_over(dz * normal, axes), sum_over(dz, axes)
    return _like(dx, x), dweight.astype(weight.dtype), dbias.astype(weight.dtype)


def _normalised(x: Array, stats: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
    wide = compute_dtype(x)
    groups = x.astype(wide).reshape(x.shape[0], stats.shape[1], -1)
    normal = ((groups - stats[..., :1]) * stats[..., 1:]).reshape(x.shape)
    weight, bias = (_per_channel(y.astype(wide), x) for y in (weight, bias))
    return normal, normal * weight + bias


def _per_channel(values: Array, x: Array) -> Array:
    return values.reshape(-1, *[1] * (x.ndim - 2))


def _like(values: Array, x: Array) -> Array:
    """The values with the dtype and the order of the axes of x in memory."""
    result = numpy.empty_like(x)
    result[...] = values
    return result
