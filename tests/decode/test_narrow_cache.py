"""Caches of 8 bits: what is written, and attention to it as to the numbers that it stands for."""

import numpy
import pytest
from arrays import integers, normal
from matrix import each_library

from cupyflash import attention_with_cache, cache_append
from cupyflash.testing import assert_close_to_float64, to_library, to_numpy64

ml_dtypes = pytest.importorskip("ml_dtypes")

PAGES, SIZE, HEADS, DIM = 9, 4, 2, 64
LARGEST = {"int8": 127, "float8_e4m3fn": 448}
SHAPES = [(), (HEADS,), (1, 1, HEADS), (PAGES, 1, 1), (PAGES, SIZE, HEADS)]


def narrow(target, values, dtype):
    """An array of 8 bits from float32 values that it has exactly."""
    if target.library == "torch":
        import torch

        return target.array(values.astype("float32")).to(getattr(torch, dtype))
    exact = values.astype(dtype if dtype == "int8" else ml_dtypes.float8_e4m3fn)
    return to_library(exact, target.library, target.device)


def rounded(values, dtype):
    """Values of 8 bits nearest to these, in float32; ties to even, beyond the largest the last."""
    if dtype == "int8":
        return numpy.clip(numpy.rint(values), -128, 127)
    clipped = numpy.clip(values, -448, 448)
    return clipped.astype(ml_dtypes.float8_e4m3fn).astype("float32")


def kinds(target):
    """The dtypes of caches that an array library has."""
    return ("int8",) if target.library == "cupy" else ("int8", "float8_e4m3fn")


def scales(seed, shape):
    values = numpy.random.default_rng(seed).uniform(0.01, 0.03, shape)
    return values.astype("float32")


@each_library()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_append(target, shape):
    """Scales that each row has of its own are written; others divide."""
    slots = [7, -1, 30, 0, 13]
    kept = [i for i, slot in enumerate(slots) if slot >= 0]
    places = tuple(numpy.divmod([slots[i] for i in kept], SIZE))
    for dtype in kinds(target):
        k, v = (normal((5, HEADS, DIM), i) for i in (0, 1))
        k[3, 0], k[4, 1, 5] = 0, 50.0  # a row of zeros, and one beyond a scale that is given
        old = rounded(50 * normal((2, PAGES, SIZE, HEADS, DIM), 2), dtype)
        caches = [narrow(target, x, dtype) for x in old]
        before = [scales(i, shape) for i in (3, 4)]
        given = [target.array(x.copy()) for x in before]
        new = [target.array(x, "float32") for x in (k, v)]
        cache_append(
            *new, *caches, None, slots=target.array(numpy.array(slots)),
            k_scale=given[0], v_scale=given[1],
        )  # fmt: skip
        for x, cache, scale, first, right in zip((k, v), caches, given, before, old):
            if shape == SHAPES[-1]:
                largest = numpy.abs(x[kept]).max(-1) / numpy.float32(LARGEST[dtype])
                first[places] = largest
                numpy.testing.assert_allclose(to_numpy64(scale), first, rtol=2**-22)
                factors = numpy.where(largest == 0, 1, largest)
            else:
                numpy.testing.assert_array_equal(to_numpy64(scale), first)
                factors = numpy.broadcast_to(first, (PAGES, SIZE, HEADS))[places]
            values = x[kept] / factors[..., None]
            found = to_numpy64(cache)
            step = 1 if dtype == "int8" else numpy.maximum(abs(values), 2**-6) * 2**-3
            near = abs(found[places] - rounded(values, dtype)) <= step  # where a tie may fall
            assert near.all() and (found[places] == rounded(values, dtype)).mean() > 0.99
            found[places] = right[places] = 0
            numpy.testing.assert_array_equal(found, right)


@each_library()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(target, shape):
    """As attention to the numbers that the cache stands for; new tokens are rounded like others."""
    for dtype in kinds(target):
        q, k, v = (normal((2, 3, heads, DIM), heads) for heads in (4, HEADS, HEADS))
        table = [[4, 0, 7], [8, 2, 1]]
        old = rounded(50 * normal((2, PAGES, SIZE, HEADS, DIM), 2), dtype)
        call = {"positions": integers(target, [5, 9]), "page_table": integers(target, table)}
        for of_q in target.dtypes:
            caches = [narrow(target, x, dtype) for x in old]
            given = [target.array(scales(i, shape)) for i in (3, 4)]
            arrays = [target.array(x, of_q) for x in (q, k, v)]
            out = attention_with_cache(
                *arrays, *caches, **call, k_scale=given[0], v_scale=given[1], window=(6, None)
            )
            meant = [
                to_numpy64(cache) * numpy.broadcast_to(to_numpy64(x), old.shape[1:4])[..., None]
                for cache, x in zip(caches, given)
            ]
            right, plain = (
                self_attention(to_numpy64(arrays[0]), *meant, table, x) for x in (64, 32)
            )
            assert_close_to_float64(to_numpy64(out), right, plain, of_q, "out", terms=8.0)


def self_attention(q, k, v, table, bits):
    """Causal attention with a window of 7 keys to 8 and 12 keys, by the definition."""
    out = numpy.zeros(q.shape)
    q, k, v = (x.astype(f"float{bits}") for x in (q, k, v))
    for b, length in enumerate((8, 12)):
        where = [(table[b][j // SIZE], j % SIZE) for j in range(length)]
        for i, h in numpy.ndindex(q.shape[1:3]):
            last = length - 3 + i
            seen = where[max(0, last - 6) : last + 1]
            keys, values = (numpy.array([x[at][h // 2] for at in seen]) for x in (k, v))
            scores = keys @ q[b, i, h] / q.dtype.type(DIM**0.5)
            weights = numpy.exp(scores - scores.max())
            out[b, i, h] = weights @ values / weights.sum()
    return out
