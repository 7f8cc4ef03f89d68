"""Decoding in plain NumPy: the oracle of the tests, and the path of a call on the CPU.

Sampling gives the same bits as ``cuda_src/decode/sample.cu``: weights are integers, and every
operation on floats before is float32 and rounded by itself. Arrays have been checked, but for what
a GPU alone knows too: an index that does not exist is an error in `append` and `embedding`.
"""

from collections.abc import Sequence
from typing import Any

import numpy

from ...runtime.array import Array
from ...runtime.philox import philox
from ...runtime.structs import header

ONE = header("decode/probability.cuh").ONE
TERMS = [
    numpy.float32(float.fromhex(term))
    for term in ("1.e974fap-10", "1.277856p-7", "1.c91ce6p-5", "1.ebdb56p-3", "1.62e4bap-1", "1p0")
]  # of the polynomial of 2^x
LARGEST_MANTISSA = numpy.float32(float.fromhex("1.fffffep0"))


def embedding(
    library: Any,
    token_weight: Array,
    position_weight: Array | None,
    tokens: Array,
    positions: Array | None,
) -> Array:
    """`cupyflash.ops.decode.embedding.embedding` on arrays of a library on the CPU."""
    out = None
    for name, indices, weight in (
        ("tokens", tokens, token_weight),
        ("positions", positions, position_weight),
    ):
        if indices is None:
            continue
        indices, table = library.to_numpy(indices), library.to_numpy(weight)
        _require_indices("embedding", name, indices.ravel().tolist(), len(table))
        rows = table[indices]
        out = rows if out is None else out.astype("float32") + rows.astype("float32")
    dtype = library.to_numpy(token_weight).dtype
    return library.from_numpy(numpy.asarray(out, dtype), token_weight)


def append(
    function: str,
    library: Any,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    positions: Array,
    sequences: Array | None,
) -> None:
    """`cache_append` on arrays of a library on the CPU."""
    rows = list(range(len(k))) if sequences is None else library.to_list(sequences)
    positions = library.to_list(positions)
    _require_indices(function, "sequences", rows, k_cache.shape[0])
    _require_indices(function, "positions", positions, k_cache.shape[1])
    for row, (sequence, position) in enumerate(zip(rows, positions)):
        k_cache[sequence, position] = k[row]
        v_cache[sequence, position] = v[row]


def _require_indices(function: str, name: str, indices: list[int], size: int) -> None:
    if indices and not 0 <= min(indices) <= max(indices) < size:
        fact = f"{name} must be from 0 to {size - 1}"
        raise ValueError(f"{function}: {fact}, got {min(indices)} to {max(indices)}")


# Sampling -------------------------------------------------------------------------------------


def sample(library: Any, arrays: Sequence[Array], sampling: Any, limit: int) -> None:
    """`cupyflash.ops.decode.sampling.sample` on arrays of a library on the CPU.

    Args:
        arrays: logits and out, and tokens, positions and ends if there is a state.
        sampling: a `Sampling` with a seed.
    """
    logits, out, *state = arrays
    places = library.to_list(state[1]) if state else [0] * len(logits)
    for row, (values, position) in enumerate(zip(library.to_numpy(logits), places)):
        if sampling.temperature == 0:
            token = greedy_row(values)
        else:
            scale, options = numpy.float32(sampling.scale), (sampling.top_k, sampling.part)
            token = sample_row(values, scale, *options, sampling.seed, (position, row))
        out[row] = token
        if state:
            tokens, positions, ends = state
            tokens[row] = max(token, 0)
            positions[row] = min(position + 1, limit)
            ends[row] = min(position + 1, limit) + 1


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
