"""The tolerance rule accepts rounding and nothing worse."""

import numpy
import pytest
from targets import CPU_TARGETS

from cupyflash.ops.attention.reference import attention_tiled
from cupyflash.testing import assert_close_to_float64, expected


def compare(actual, baseline_error=0.0, dtype="float32"):
    exact = numpy.array([1.0, -numpy.inf, 4.0])
    baseline = exact + [baseline_error, 0, 0]
    assert_close_to_float64(numpy.array(actual), exact, baseline, dtype, "out")


def test_accepts_twice_the_error_of_the_baseline():
    compare([1.0, -numpy.inf, 4.0])
    compare([1.002, -numpy.inf, 4.0], baseline_error=0.001)
    compare([1.0, -numpy.inf, 4.0 + 2**-8], dtype="float16")


@pytest.mark.parametrize(
    "actual",
    [
        [1.003, -numpy.inf, 4.0],
        [numpy.nan, -numpy.inf, 4.0],
        [1.0, -1e30, 4.0],
        [1.0, numpy.inf, 4],
    ],
    ids=str,
)
def test_rejects(actual, capsys):
    with pytest.raises(AssertionError, match="out: max error .* worst at"):
        compare(actual, baseline_error=0.001)
    assert "1 of 3 beyond" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "options",
    [{"scale": 0.13}, {"causal": True}, {"window": (40, None)}, {"softcap": 50.0}],
    ids=str,
)
def test_a_wrong_option_is_seen(options, dtype):
    """Each option left out moves the results beyond the tolerance: the tests can see it."""
    inputs = CPU_TARGETS[0].inputs(dtype, seqlen_q=60)
    out, lse = attention_tiled(inputs.q, inputs.k, inputs.v)
    found = expected(inputs, **options)
    with pytest.raises(AssertionError, match="lse"):
        found.check(lse=lse)
    if "softcap" not in options:  # so weak a softcap drowns in the rounding of float16 outputs
        with pytest.raises(AssertionError, match="out"):
            found.check(out=out)
