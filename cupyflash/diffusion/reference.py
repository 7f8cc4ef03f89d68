"""A diffusion step in NumPy: the oracle of the tests, and what runs where there is no GPU."""

from collections.abc import Sequence

import numpy

from ..attention.grouped import Array, compute_dtype
from .normal import normal


def step(
    table: numpy.ndarray,
    x: Array,
    predicted: Array,
    noise: Array | None,
    numbers: numpy.ndarray,
    seed: int | None,
    clip: float | None,
    strides: Sequence[int],
) -> Array:
    """x one step less noisy, in float64 for float64 x, else in float32.

    Args:
        table: coefficients (num_steps, 6).
        numbers: indices into it, of each sample or one.
        strides: of x; noise that is drawn from the seed counts places in this order.
    """
    wide = compute_dtype(x)
    per_sample = (-1, *[1] * (x.ndim - 1)) if numbers.size != 1 else ()
    of_element = numpy.broadcast_to(numbers.reshape(per_sample), x.shape)
    if noise is None and seed is not None:
        order = numpy.argsort([-stride for stride in strides], kind="stable")
        in_memory = of_element.transpose(order)
        drawn = normal(x.size, in_memory.ravel(), seed).reshape(in_memory.shape)
        noise = drawn.transpose(numpy.argsort(order))
    to_x0, model_to_x0, x0_to_x, x_to_x, model_to_x, noise_to_x = numpy.moveaxis(
        table.astype(wide)[of_element], -1, 0
    )
    values, model = x.astype(wide), predicted.astype(wide)
    x0 = to_x0 * values + model_to_x0 * model
    if clip is not None:
        x0 = numpy.clip(x0, -clip, clip)
    result = numpy.empty_like(x)  # keeps the order of its axes in memory
    added = 0 if noise is None else noise_to_x * noise.astype(wide)
    result[...] = x0_to_x * x0 + x_to_x * values + model_to_x * model + added
    return result
