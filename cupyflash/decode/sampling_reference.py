"""Tokens from logits in NumPy: the oracle of the tests, and what runs where there is no GPU.

The same bits as ``cuda_src/decode/sample.cu``: weights are integers, and every operation on floats
before is float32 and rounded by itself.
"""

import numpy

from ..runtime.philox import philox
from ..runtime.structs import header

ONE = header("decode/probability.cuh").ONE
TERMS = [
    numpy.float32(float.fromhex(term))
    for term in ("1.e974fap-10", "1.277856p-7", "1.c91ce6p-5", "1.ebdb56p-3", "1.62e4bap-1", "1p0")
]  # of 2^x
LARGEST_MANTISSA = numpy.float32(float.fromhex("1.fffffep0"))


def weights(distance: numpy.ndarray, scale: float) -> numpy.ndarray:
    """2^(-scale * distance) * 2^ONE, rounded down, as uint64; all float32."""
    single = numpy.float32
    with numpy.errstate(over="ignore"):
        exponent = -(distance * single(scale))
    counts = exponent > -(ONE + 1)
    exponent = numpy.where(counts, exponent, single(0))
    whole = numpy.floor(exponent)
    x = exponent - whole
    y = numpy.full_like(x, TERMS[0])
    for term in TERMS[1:]:
        y = y * x + term
    y = numpy.minimum(y, LARGEST_MANTISSA)
    mantissa = (y.view("uint32") & numpy.uint32(0x7FFFFF)) | numpy.uint32(0x800000)
    result = mantissa.astype("uint64") << numpy.uint64(ONE - 23)
    return numpy.where(counts, result >> (-whole).astype("uint64"), numpy.uint64(0))


def last_kept(distance: numpy.ndarray, weight: numpy.ndarray, top_k: int, top_p: int) -> float:
    """The distance up to which tokens are kept; top_p in parts of 2^32, 0 is off for both."""
    order = numpy.argsort(distance, kind="stable")
    order = order[weight[order] > 0]
    last = numpy.inf
    if 0 < top_k <= len(order):
        last = distance[order[top_k - 1]]
    if top_p > 0:
        sums = numpy.cumsum(weight[order])
        kept = distance[order] <= last
        target = max(1, int(sums[kept][-1]) * top_p >> 32)
        last = distance[order[numpy.searchsorted(sums, numpy.uint64(target))]]
    return last


def sample_row(
    logits: numpy.ndarray, scale: float, top_k: int, top_p: int, seed: int, counter: tuple[int, int]
) -> int:
    """A token of one row; -1 if it is no distribution. ``scale`` is log2(e) / temperature.

    Args:
        counter: position and row.
    """
    logits = logits.astype("float32")
    largest = logits.max()
    if not -numpy.inf < largest < numpy.inf:
        return -1
    with numpy.errstate(over="ignore"):
        distance = largest - logits
    weight = weights(distance, scale)
    last = last_kept(distance, weight, top_k, top_p)
    sums = numpy.cumsum(numpy.where(distance <= last, weight, numpy.uint64(0)))
    position, row = (numpy.uint64(x & 0xFFFFFFFF) for x in counter)
    high, low, *_ = philox(seed, (position, row, numpy.uint64(0), numpy.uint64(0)))
    random = int(high) << 32 | int(low)
    part = random * int(sums[-1]) >> 64
    return int(numpy.searchsorted(sums, numpy.uint64(part), side="right"))


def greedy_row(logits: numpy.ndarray) -> int:
    """The largest logit, of equal ones the first; -1 if the row is no distribution."""
    logits = logits.astype("float32")
    return int(logits.argmax()) if -numpy.inf < logits.max() < numpy.inf else -1
