"""Wrong calls of the projections: each is refused by name, on a CPU and on a GPU alike."""

import numpy
import pytest
from arrays import normal, stored
from matrix import each_library
from wrong_calls import CHOICE, FLAG, INTEGER, NOT_IN_FLOAT32, NUMBER, array, check_refused

import cupyflash

DTYPE = "float16"
WEIGHTS = ("int32", "float64", "complex64")  # float32 weights are right


def arrays(target, **shapes):
    return {
        name: stored(target, normal(shape, i), DTYPE)
        for i, (name, shape) in enumerate(shapes.items())
    }


def kinds_of(good, *required, free=()):
    """Values for each array, None among them for those that must be there.

    Args:
        free: arrays whose first axis may have any length.
    """
    dtypes = {"x": ("int32", "float64", "complex64", "float32"), "residual": ("int32", "float32")}
    kinds = {}
    for name, x in good.items():
        wrong = array(x, optional=name not in required, dtypes=dtypes.get(name, WEIGHTS))
        shapes = (x[..., :-1], x[..., ::2], x[..., None], *(() if name in free else (x[:-1],)))
        kinds[name] = (*wrong, *shapes)
    return kinds


NO_TUPLES = ("layer", 1, 1.5, True, [1.0], {}, object(), (1, 2), cupyflash.Norm, cupyflash.Rotary)


@each_library()
def test_linear(target):
    good = arrays(target, x=(5, 16), weight=(24, 16), bias=(24,), residual=(5, 24))
    kinds = kinds_of(good, "x", "weight") | {"norm": NO_TUPLES, "activation": (*CHOICE, "none")}
    check_refused(cupyflash.linear, good | {"activation": "silu"}, kinds, least=80)


@each_library()
def test_mlp(target):
    good = arrays(
        target,
        x=(5, 16),
        up_weight=(24, 16),
        down_weight=(8, 24),
        up_bias=(24,),
        down_bias=(8,),
        gate_weight=(24, 16),
        gate_bias=(24,),
        residual=(5, 8),
    )
    required = ("x", "up_weight", "down_weight", "gate_weight")
    kinds = kinds_of(good, *required) | {"norm": NO_TUPLES, "activation": CHOICE}
    check_refused(cupyflash.mlp, good, kinds, least=130)


@each_library()
def test_qkv_projection(target):
    good = arrays(target, x=(2, 5, 16), weight=(4 * 8, 16), bias=(32,))
    kinds = kinds_of(good, "x", "weight", free=("x",))
    kinds |= {"heads_q": (*INTEGER, 0, -1, 3, None), "heads_kv": (*INTEGER, 0, -1, 3)}
    kinds |= {"norm": NO_TUPLES, "rotary": NO_TUPLES}
    good |= {"heads_q": 2, "heads_kv": 1}
    check_refused(cupyflash.qkv_projection, good, kinds, least=100)


@each_library()
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_norm(target, rms):
    """Of each function that takes one."""
    good = arrays(target, x=(2, 5, 16), weight=(32, 16), norm_weight=(16,), norm_bias=(16,))
    x, projection = good.pop("x"), good.pop("weight")
    down = stored(target, normal((8, 32), 9), DTYPE)
    good = {"weight": good["norm_weight"], "bias": good["norm_bias"]}

    def linear(**of_norm):
        return cupyflash.linear(x, projection, norm=cupyflash.Norm(**of_norm))

    def mlp(**of_norm):
        return cupyflash.mlp(x, projection, down, norm=cupyflash.Norm(**of_norm))

    def qkv_projection(**of_norm):
        norm = cupyflash.Norm(**of_norm)
        return cupyflash.qkv_projection(x, projection, heads_q=2, heads_kv=1, norm=norm)

    kinds = kinds_of(good, "weight")
    if rms:
        kinds["bias"] = (good["bias"], *array(good["weight"], optional=True))
    kinds |= {"eps": (*NUMBER, *NOT_IN_FLOAT32, -1.0, None), "rms": (*FLAG, None)}
    good |= {"eps": 1e-5, "rms": rms, "bias": None if rms else good["bias"]}
    for function in (linear, mlp, qkv_projection):
        check_refused(function, good, kinds, least=55)


@each_library()
def test_rotary(target):
    tensors = arrays(target, x=(2, 5, 16), weight=(32, 16), cos=(5, 4), sin=(5, 4))
    x, weight = tensors.pop("x"), tensors.pop("weight")
    positions = target.array(numpy.arange(10, dtype="int32").reshape(2, 5) % 5)

    def qkv_projection(**rotary):
        rotary = cupyflash.Rotary(**rotary)
        return cupyflash.qkv_projection(x, weight, heads_q=2, heads_kv=1, rotary=rotary)

    kinds = kinds_of(tensors, "cos", "sin")
    shapes = (positions[:1], positions[:, :-1], positions[0], positions - 1, positions + 1)
    if target.gpu:
        shapes = shapes[:3]  # values on a GPU are not looked at
    wrong = array(positions, optional=True, dtypes=("float32", "int16", "complex64"))
    kinds["positions"] = (*wrong, *shapes)
    kinds["interleaved"] = (*FLAG, None)
    good = tensors | {"positions": positions, "interleaved": False}
    check_refused(qkv_projection, good, kinds, least=60)


@each_library()
def test_an_option_without_dimensions_is_a_number(target):
    """Not an object that could change after it was looked at; on a GPU it would be waited for."""
    tensors = arrays(target, x=(5, 16), weight=(24, 16), norm_weight=(16,))
    x, weight, of_norm = tensors.values()
    eps = target.array(numpy.array(1.0, "float32"))
    norm = cupyflash.Norm(of_norm, eps=eps, rms=True)
    if target.gpu:
        with pytest.raises(TypeError, match="^linear: eps of norm must be a number"):
            cupyflash.linear(x, weight, norm=norm)
        return
    for value in (1.0, 9.0):
        eps[...] = value
        right = cupyflash.linear(x, weight, norm=cupyflash.Norm(of_norm, eps=value, rms=True))
        assert (cupyflash.linear(x, weight, norm=norm) == right).all()
