"""Activations and their derivatives over the whole range of float32, in every kernel with them."""

import numpy
import pytest
from arrays import to_numpy
from matrix import each_library

import cupyflash
from cupyflash.ops.norm.reference import ACTIVATIONS
from cupyflash.testing.tolerance import assert_close_to_float64

MISSING = numpy.array([numpy.nan, numpy.inf], "float32")


def arguments():
    """Arguments in float32: powers of two of both signs up to 2^127, and every 1/64 up to 40."""
    powers = 2.0 ** numpy.arange(-126, 128)
    near = numpy.arange(1, 40 * 64) / 64
    return numpy.concatenate([-powers, powers, -near, near]).astype("float32")


def check(name, z, value, slope):
    """Values, as parts of their arguments, and slopes: both between -0.2 and 1.2."""
    value_of, slope_of = ACTIVATIONS[name]
    z, value, slope, wide = z[:-2], value[:-2], slope[:-2], z[:-2].astype("float64")
    for found, exact, yardstick, of in (
        (value / z.astype(float), value_of(wide) / wide, value_of(z) / z, "out / z"),
        (slope, slope_of(wide), slope_of(z), "slope"),
    ):
        assert numpy.abs(exact).max() < 1.2
        assert_close_to_float64(found, exact, yardstick, "float32", f"{name}: {of}")


@each_library()
@pytest.mark.parametrize("activation", ["silu", "mish", "gelu", "gelu_tanh"])
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_group_norm(target, activation):
    """Without a weight the argument is the bias, and its gradient the slope."""
    z = numpy.concatenate([arguments(), MISSING])
    x = numpy.linspace(-1, 1, z.size).reshape(1, z.size, 1)
    x, dout, weight, bias = (
        target.array(y, "float32") for y in (x, numpy.ones_like(x), numpy.zeros_like(z), z)
    )
    out, stats = cupyflash.group_norm(
        x, z.size // 2, weight, bias, activation=activation, return_stats=True
    )
    _, _, dbias = cupyflash.group_norm_backward(dout, x, weight, bias, stats, activation=activation)
    value, slope = to_numpy(out).reshape(-1), to_numpy(dbias)
    assert numpy.isnan([value[-2], slope[-2]]).all()
    assert value[-1] == numpy.inf
    check(activation, z, value, slope)


@each_library(library="torch", device="cuda")
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_gate(target, activation):
    from cupyflash.ops.linear import autograd, elementwise

    z = numpy.concatenate([arguments(), MISSING])
    gate, one = (target.array(y[None], "float32") for y in (z, numpy.ones_like(z)))
    (out,) = elementwise.gate(autograd.LIBRARY, activation, gate, one)
    dgate, dup = elementwise.gate(autograd.LIBRARY, activation, gate, one, one)
    out, slope = to_numpy(out)[0], to_numpy(dgate)[0]
    assert (out == to_numpy(dup)[0])[:-2].all()
    assert numpy.isnan(out[-2])
    assert out[-1] == numpy.inf
    check(activation, z, out, slope)
