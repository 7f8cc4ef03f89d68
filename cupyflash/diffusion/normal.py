"""Standard normal numbers from Philox, as ``cuda_src/diffusion/normal.cuh`` computes them."""

import numpy

from ..runtime.philox import philox

STREAM = numpy.uint64(1)  # of Philox; dropout of the same seed has another


def normal(size: int, steps: numpy.ndarray, seed: int) -> numpy.ndarray:
    """Standard normal numbers, float32 (size,), for the elements of a tensor.

    Args:
        steps: of each element, int64 (size,) or one number.
    """
    number = numpy.arange(size, dtype="uint64")
    group = number // numpy.uint64(4)
    low, half = numpy.uint64(0xFFFFFFFF), numpy.uint64(32)
    step = numpy.asarray(steps).astype("uint64") & low
    words = numpy.stack(philox(seed, (group & low, group >> half, step, STREAM)), -1)
    place = (number % numpy.uint64(4)).astype("int64")
    pair = place // 2 * 2
    a, b = (numpy.take_along_axis(words, (pair + i)[:, None], -1)[:, 0] for i in (0, 1))
    u = ((a >> numpy.uint64(8)) + numpy.uint64(1)).astype("float64") * 2.0**-24
    signed = (b >> numpy.uint64(8)).astype("int64")
    signed -= (signed >> 23) << 24  # as a 24-bit number with a sign
    angle = numpy.pi * signed.astype("float64") * 2.0**-23
    direction = numpy.where(place % 2 == 0, numpy.cos(angle), numpy.sin(angle))
    return (numpy.sqrt(-2 * numpy.log(u)) * direction).astype("float32")
