"""Maxima that move from key tile to key tile, by a little or by more than a weight can hold.

The kernels of sm_90 take the weights of most tiles relative to the maximum of the tiles before, and
compute the scores of a warp again where that does not serve.
"""

import dataclasses

import numpy
import pytest
from matrix import each
from passes import forward_backward

from cupyflash.testing import expected, make_alibi_slopes

LENGTHS = 260, 710
FACTORS = {  # of the keys, by their number
    "grow": lambda j: 1 + 15 * (LENGTHS[1] - j) / LENGTHS[1],
    "grow a little": lambda j: 1 + 4 * (LENGTHS[1] - j) / LENGTHS[1],
    "shrink": lambda j: 1 + 8 * j / LENGTHS[1],
    "one stands out": lambda j: numpy.where(numpy.isin(j, [3, 400]), 20.0, 1.0),
    "many stand out": lambda j: numpy.where(j % 97 == 5, 12.0, 1.0),
}
OPTIONS = [
    {},
    {"causal": True, "window": (500, None)},
    {"softcap": 90.0, "sinks": True},
    {"alibi_slopes": True},
    {"bias": True},
    {"mask": True, "causal": True},
    {"mask": True},
    {"dropout_p": 0.2, "dropout_seed": 3, "bias": True},
]


def problem(target, factor, dtype, **shape):
    inputs = target.inputs(dtype, seqlen_q=LENGTHS[0], seqlen_k=LENGTHS[1], **shape)
    factors = FACTORS[factor](numpy.arange(LENGTHS[1])).astype("float32")
    k = inputs.k * target.array(factors[:, None, None], dtype)
    return dataclasses.replace(inputs, k=k)


def arrays(target, dtype, options):
    rng, made = numpy.random.default_rng(4), dict(options)
    if "alibi_slopes" in options:
        made["alibi_slopes"] = make_alibi_slopes(4, target.library, device=target.device)
    if "bias" in options:  # rows of a multiple of 16 bytes, which TMA can load
        values = 8 * rng.standard_normal((1, 4, LENGTHS[0], 712), dtype="float32")
        made["bias"] = target.array(values, dtype)[..., : LENGTHS[1]]
    if made.pop("mask", False):
        made["bias"] = target.array(rng.random((2, 1, 1, LENGTHS[1])) > 0.1)
    if "sinks" in options:
        made["sinks"] = target.array(rng.standard_normal(4, dtype="float32"))
    return made


@each(device="cuda")
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_head_dims(target, head_dim, factor):
    dtype = target.dtypes[head_dim // 32 % len(target.dtypes)]
    inputs = problem(target, factor, dtype, head_dim=head_dim, batch=2)
    expected(inputs).check(**forward_backward(inputs))


@each(device="cuda")
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(target, options, factor):
    """Both 16-bit dtypes: a weight of float16 has less room."""
    for dtype in target.dtypes:
        inputs = problem(target, factor, dtype, head_dim=64, batch=2)
        made = arrays(target, dtype, options)
        expected(inputs, **made).check(**forward_backward(inputs, **made))


@each(device="cuda")
@pytest.mark.parametrize("factor", FACTORS)
def test_few_tiles_and_many_keys(target, factor):
    """Blocks divide the keys of a tile, and merge sums relative to maxima that are no maxima."""
    inputs = target.inputs(target.dtypes[0], batch=1, heads_q=1, seqlen_q=70, seqlen_k=9000)
    factors = numpy.repeat(FACTORS[factor](numpy.arange(LENGTHS[1])), 13)[:9000].astype("float32")
    k = inputs.k * target.array(factors[:, None, None], target.dtypes[0])
    inputs = dataclasses.replace(inputs, k=k)
    expected(inputs).check(**forward_backward(inputs))
