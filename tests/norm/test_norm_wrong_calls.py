"""Wrong calls of the norms and of their gradients, refused alike on every library."""

import math

import numpy
import pytest
import wrong_calls
from arrays import normal, stored
from matrix import each_library

import cupyflash


def like_x(x):
    """What an array that must be like x cannot be."""
    others = (x[:1], x[..., :8], x[0])
    return (*wrong_calls.array(x), *others)


def like_weight(weight):
    """What a weight cannot be."""
    twice = weight.repeat(2)
    values = wrong_calls.array(weight, optional=True)
    return (*values, weight[:5], weight[:1], twice, twice[::2], weight[None])


EPS = (*wrong_calls.NUMBER, *wrong_calls.NOT_IN_FLOAT32, -1.0, None)
PROBABILITY = (*wrong_calls.NUMBER, -0.1, 1.0, 2, None)


def like_seed(seed):
    """What a seed cannot be; ``seed`` is an array that it can be."""
    integers = (-1, -(2**70), 2**63, 2**70, True, 1.5, math.nan)
    of_torch = type(seed).__module__ == "torch"
    narrow = seed.int() if of_torch else seed.astype("int32")
    others = (narrow, seed.repeat(2), seed[:0], seed[None])
    if of_torch:
        others += (seed.to("meta"), *((seed.cpu(),) if seed.is_cuda else ()))
    strangers = ("text", [3], {}, object(), type(seed), numpy.ones(1), None)
    if type(seed) is not numpy.ndarray:
        strangers += (numpy.array([3]),)
    return (*integers, *others, *strangers)


@each_library()
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norm(target, name):
    make = lambda shape, i: stored(target, normal(shape, i), "float32")
    x, residual, weight = make((4, 16), 0), make((4, 16), 1), make(16, 2)
    seed = target.array(numpy.array([3]))
    good = {"x": x, "weight": weight, "residual": residual, "eps": 1e-5}
    dropout = {"dropout_p": 0.1, "dropout_seed": seed}
    kinds = {
        "x": like_x(x),
        "weight": like_weight(weight),
        "residual": (*like_x(x)[:-4], x[:1], x[..., :8]),
        "eps": EPS,
        "dropout_p": PROBABILITY,
    }
    if name == "layer_norm":
        good["bias"] = make(16, 3)
        kinds["bias"] = like_weight(weight)
        kinds["weight"] = (*kinds["weight"], None)
    kinds["residual"] = tuple(y for y in kinds["residual"] if y is not None)
    wrong_calls.check_refused(getattr(cupyflash, name), good, kinds, least=80)
    kinds["dropout_seed"] = tuple(y for y in like_seed(seed) if y is not None)
    wrong_calls.check_refused(getattr(cupyflash, name), {**good, **dropout}, kinds, least=95)


@each_library()
@pytest.mark.parametrize("name", ["layer_norm_backward", "rms_norm_backward"])
def test_norm_backward(target, name):
    make = lambda shape, i: stored(target, normal(shape, i), "float32")
    x, dout, weight = make((4, 16), 0), make((4, 16), 1), make(16, 2)
    _, stats = cupyflash.layer_norm(x, weight, return_stats=True)
    good = {"dout": dout, "x": x, "weight": weight, "stats": stats, "dresidual": dout}
    of_x = like_x(x)
    kinds = {
        "dout": (*of_x, *_half(dout)[1:]),
        "x": (*of_x, *_half(x)),
        "weight": like_weight(weight),
        "stats": (*like_x(stats)[:-2], stats[..., :1], stats[0], _half(stats)[0]),
        "dresidual": tuple(y for y in (*of_x, *_half(x)) if y is not None),
        "dropout_p": PROBABILITY,
    }
    wrong_calls.check_refused(getattr(cupyflash, name), good, kinds, least=80)
    seed = target.array(numpy.array([3]))
    kinds["dropout_seed"] = like_seed(seed)
    dropout = {"dropout_p": 0.1, "dropout_seed": seed}
    wrong_calls.check_refused(getattr(cupyflash, name), {**good, **dropout}, kinds, least=110)


def _half(x):
    return (x.half() if type(x).__module__ == "torch" else x.astype("float16"),)


@each_library()
def test_group_norm(target):
    make = lambda shape, i: stored(target, normal(shape, i), "float32")
    x, weight, bias = make((2, 8, 5), 0), make(8, 1), make(8, 2)
    of_weight = (*like_weight(weight), None)
    wrong_calls.check_refused(
        cupyflash.group_norm,
        {"x": x, "num_groups": 2, "weight": weight, "bias": bias, "activation": "silu"},
        {
            "x": (*wrong_calls.array(x)[:-1], x[0, 0], x[:, :4]),  # may have no positions
            "num_groups": (*wrong_calls.INTEGER, 0, -1, 3, 16, None),
            "weight": of_weight,
            "bias": of_weight,
            "eps": EPS,
            "activation": (*wrong_calls.CHOICE, "relu", numpy.ones(2)),
        },
        least=90,
    )


@each_library()
def test_group_norm_backward(target):
    make = lambda shape, i: stored(target, normal(shape, i), "float32")
    x, dout, weight, bias = make((2, 8, 5), 0), make((2, 8, 5), 1), make(8, 1), make(8, 2)
    _, stats = cupyflash.group_norm(x, 2, weight, bias, return_stats=True)
    of_weight = (*like_weight(weight), None)
    of_x = (*wrong_calls.array(x), x[0, 0], x[:, :4], *_half(x))
    wrong_calls.check_refused(
        cupyflash.group_norm_backward,
        {"dout": dout, "x": x, "weight": weight, "bias": bias, "stats": stats},
        {
            "dout": of_x,
            "x": of_x,
            "weight": of_weight,
            "bias": of_weight,
            "stats": (*wrong_calls.array(stats), stats[:1], stats[..., :1], *_half(stats)),
            "activation": (*wrong_calls.CHOICE, "relu", numpy.ones(2)),
        },
        least=90,
    )
