"""Philox4x32-10 in NumPy, as cuda_src/diffusion/philox.cuh computes it on a GPU.

Source: Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC11).
"""

import numpy

_MASK = numpy.uint64(0xFFFFFFFF)
_SHIFT = numpy.uint64(32)


def philox(counters: numpy.ndarray, seed: int) -> numpy.ndarray:
    """Random 32-bit words: uint64 (..., 4) from counters uint64 (..., 4) below 2^32."""
    x, y, z, w = numpy.moveaxis(counters.astype("uint64"), -1, 0)
    key_x, key_y = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = x * numpy.uint64(0xD2511F53), z * numpy.uint64(0xCD9E8D57)
        x, y, z, w = (
            (b >> _SHIFT) ^ y ^ numpy.uint64(key_x),
            b & _MASK,
            (a >> _SHIFT) ^ w ^ numpy.uint64(key_y),
            a & _MASK,
        )
        key_x = (key_x + 0x9E3779B9) & 0xFFFFFFFF
        key_y = (key_y + 0xBB67AE85) & 0xFFFFFFFF
    return numpy.stack([x, y, z, w], -1)


def normal(size: int, steps: numpy.ndarray, seed: int) -> numpy.ndarray:
    """Standard normal numbers, float32 (size,), for the elements of a tensor.

    Args:
        steps: of each element, int64 (size,) or one number.
    """
    number = numpy.arange(size, dtype="uint64")
    group = number // numpy.uint64(4)
    step = numpy.broadcast_to(numpy.asarray(steps).astype("uint64") & _MASK, size)
    zero = numpy.zeros_like(group)
    words = philox(numpy.stack([group & _MASK, group >> _SHIFT, step, zero], -1), seed)
    place = (number % numpy.uint64(4)).astype("int64")
    pair = place // 2 * 2
    a, b = (numpy.take_along_axis(words, (pair + i)[:, None], -1)[:, 0] for i in (0, 1))
    u = ((a >> numpy.uint64(8)) + numpy.uint64(1)).astype("float64") * 2.0**-24
    signed = (b >> numpy.uint64(8)).astype("int64")
    signed -= (signed >> 23) << 24  # as a 24-bit number with a sign
    angle = numpy.pi * signed.astype("float64") * 2.0**-23
    direction = numpy.where(place % 2 == 0, numpy.cos(angle), numpy.sin(angle))
    return (numpy.sqrt(-2 * numpy.log(u)) * direction).astype("float32")
