"""Dynamic thresholding: how large the predicted sample may be (arXiv:2205.11487)."""

import sys
from typing import Any

import numpy

from ..runtime.array import Array


def thresholds(
    threshold: tuple[float, float],
    library: Any,
    coefficients: Array | tuple[float, float],
    x: Array,
    predicted: Array,
) -> Array:
    """Quantiles of the magnitudes of the predicted samples, float32 (batch,), at least 1.

    Args:
        threshold: (quantile, largest threshold).
        coefficients: x_to_x0 and model_to_x0, or an array (batch or 1, 2) of them.
        x, predicted: CuPy arrays or torch tensors of at least one element.
    """
    ratio, largest = threshold
    batch = x.shape[0] if x.ndim else 1
    values, model = (library.float32(y).reshape(batch, -1) for y in (x, predicted))
    if isinstance(coefficients, tuple):
        of_x, of_model = coefficients
    else:
        of_x, of_model = coefficients[:, :1], coefficients[:, 1:]
    sizes = abs(of_x * values + of_model * model)
    if library.name == "torch.Tensor":
        where, ordered = sys.modules["torch"].where, sizes.sort(1).values
    else:
        where, ordered = sys.modules["cupy"].where, sys.modules["cupy"].sort(sizes, axis=1)
    last = ordered.shape[1] - 1
    place = ratio * last
    low, high = ordered[:, int(place)], ordered[:, min(int(place) + 1, last)]
    found = low + (high - low) * (place - int(place))
    # NaN lies behind all numbers; a sample with one has no quantile.
    largest_size = ordered[:, last]
    return where(largest_size != largest_size, largest_size, found.clip(1.0, largest))


def gathered(library: Any, table: Array, steps: Array) -> Array:
    """The first two coefficients of steps that only the device knows, (steps, 2).

    Those of steps outside of the table do not matter: the kernel gives NaN.
    """
    places = steps.reshape(-1).clip(0, table.shape[0] - 1)
    return table[places.long() if library.name == "torch.Tensor" else places][:, :2]


def numpy_thresholds(threshold: tuple[float, float], x0: numpy.ndarray) -> numpy.ndarray:
    """The same of predicted samples, in their dtype, (batch, 1, ...)."""
    ratio, largest = threshold
    batch = x0.shape[0] if x0.ndim else 1
    found = numpy.quantile(numpy.abs(x0).reshape(batch, -1), ratio, axis=1)
    limits = numpy.clip(found, 1.0, largest).astype(x0.dtype)
    return limits.reshape(-1, *[1] * (x0.ndim - 1)) if x0.ndim else limits[0]
