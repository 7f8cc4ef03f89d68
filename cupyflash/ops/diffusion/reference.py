"""A diffusion step in NumPy: the oracle of the tests, and the path without a GPU."""

import math
from collections.abc import Sequence

import numpy

from ...runtime.array import Array, compute_dtype, silent
from ...runtime.philox import philox

NOISE_STREAM = numpy.uint64(1)  # of Philox; dropout with the same seed has another


@silent
def step(
    table: numpy.ndarray,
    x: Array,
    predicted: Array,
    noise: Array | None,
    numbers: numpy.ndarray,
    seed: int | numpy.ndarray | None,
    clip: float | None,
    strides: Sequence[int],
    threshold: tuple[float, float] | None = None,
) -> Array:
    """x one step less noisy, in float64 for float64 x, else in float32.

    Args:
        table: coefficients (num_steps, 6).
        numbers: indices into it, of each sample or one.
        seed: one, or int64 (batch,) of the samples.
        strides: of x; noise that is drawn from the seed counts places in this order.
        threshold: (quantile, largest threshold) of dynamic thresholding.
    """
    wide = compute_dtype(x)
    per_sample = (-1, *[1] * (x.ndim - 1)) if numbers.size != 1 else ()
    of_element = numpy.broadcast_to(numbers.reshape(per_sample), x.shape)
    if noise is None and seed is not None:
        noise = _drawn(of_element, seed, strides)
    to_x0, model_to_x0, x0_to_x, x_to_x, model_to_x, noise_to_x = numpy.moveaxis(
        table.astype(wide)[of_element], -1, 0
    )
    values, model = x.astype(wide), predicted.astype(wide)
    x0 = to_x0 * values + model_to_x0 * model
    if threshold is not None and x.size:
        limits = thresholds(threshold, x0)
        x0 = numpy.clip(x0, -limits, limits) / limits
    elif clip is not None:
        x0 = numpy.clip(x0, -clip, clip)
    result = numpy.empty_like(x)  # keeps the order of its axes in memory
    added = 0.0
    if noise is not None:  # a step that adds none does not read it, so it may be anything
        added = noise_to_x * numpy.where(noise_to_x == 0, 0, noise.astype(wide))
    result[...] = x0_to_x * x0 + x_to_x * values + model_to_x * model + added
    return result


@silent
def thresholds(threshold: tuple[float, float], x0: numpy.ndarray) -> numpy.ndarray:
    """Thresholds of predicted samples, (batch, 1, ...) in their dtype (arXiv:2205.11487)."""
    ratio, largest = threshold
    batch = x0.shape[0] if x0.ndim else 1
    found = numpy.quantile(numpy.abs(x0).reshape(batch, -1), ratio, axis=1)
    limits = numpy.clip(found, 1.0, largest).astype(x0.dtype)
    return limits.reshape(-1, *[1] * (x0.ndim - 1)) if x0.ndim else limits[0]


def normal(size: int, steps: numpy.ndarray, seed: int) -> numpy.ndarray:
    """Standard normal numbers as ``cuda_src/diffusion/normal.cuh`` computes them, float32 (size,).

    Args:
        steps: of each element, int64 (size,) or one number.
    """
    number = numpy.arange(size, dtype="uint64")
    group = number // numpy.uint64(4)
    low, half = numpy.uint64(0xFFFFFFFF), numpy.uint64(32)
    step = numpy.asarray(steps).astype("uint64") & low
    words = numpy.stack(philox(seed, (group & low, group >> half, step, NOISE_STREAM)), -1)
    place = (number % numpy.uint64(4)).astype("int64")
    pair = place // 2 * 2
    a, b = (numpy.take_along_axis(words, (pair + i)[:, None], -1)[:, 0] for i in (0, 1))
    u = ((a >> numpy.uint64(8)) + numpy.uint64(1)).astype("float64") * 2.0**-24
    signed = (b >> numpy.uint64(8)).astype("int64")
    signed -= (signed >> 23) << 24  # a signed number of 24 bits
    angle = numpy.pi * signed.astype("float64") * 2.0**-23
    direction = numpy.where(place % 2 == 0, numpy.cos(angle), numpy.sin(angle))
    return (numpy.sqrt(-2 * numpy.log(u)) * direction).astype("float32")


def _drawn(steps: Array, seed: int | numpy.ndarray, strides: Sequence[int]) -> Array:
    """Noise for elements with these steps."""
    order = numpy.argsort([-stride for stride in strides], kind="stable")
    in_memory = steps.transpose(order)
    if isinstance(seed, numpy.ndarray):
        # The batch is the outermost axis. NumPy cannot find out what -1 is where it is empty.
        samples = in_memory.reshape(len(seed), math.prod(steps.shape[1:]))
        seeds = [int(s) % 2**64 for s in seed]
        drawn = [normal(of.size, of, s) for of, s in zip(samples, seeds)]
        drawn = numpy.asarray(drawn, "float32").reshape(in_memory.shape)
    else:
        drawn = normal(steps.size, in_memory.ravel(), seed).reshape(in_memory.shape)
    return drawn.transpose(numpy.argsort(order))
