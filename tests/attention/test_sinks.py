"""Attention sinks: a logit of each head in the denominator, and its gradient."""

import numpy
import pytest
from matrix import each
from passes import forward_backward

import cupyflash
from cupyflash.ops.attention.operations import BACKWARD, FORWARD
from cupyflash.ops.attention.options import Extras
from cupyflash.testing import expected, to_float64


def make_sinks(target, heads=4, dtype="float32", factor=1.0):
    values = factor * numpy.random.default_rng(7).standard_normal(heads, dtype="float32")
    return target.array(values, dtype)


@each()
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (30, 0), "softcap": 5.0},
        {"dropout_p": 0.3, "dropout_seed": 11},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "q"])
def test_results(target, options, head_dim, dtype):
    inputs = target.inputs(
        target.dtypes[0], seqlen_q=130, seqlen_k=150, heads_kv=2, head_dim=head_dim
    )
    sinks = make_sinks(target, dtype=target.dtypes[0] if dtype == "q" else dtype)
    exact = expected(inputs, sinks=sinks, **options)
    exact.check(**forward_backward(inputs, sinks=sinks, **options))


@each()
@pytest.mark.parametrize("factor", [0.0, 30.0, 1000.0])
def test_size(target, factor):
    """Far above and far below the scores; 0 is a logit like any other."""
    inputs = target.inputs(target.dtypes[0], seqlen_q=70)
    sinks = make_sinks(target, factor=factor)
    expected(inputs, sinks=sinks).check(**forward_backward(inputs, sinks=sinks))


@each()
def test_minus_infinity_is_no_sink(target):
    inputs = target.inputs("float16", seqlen_q=70)
    sinks = target.array(numpy.full(4, -numpy.inf), "float32")
    results, plain = (forward_backward(inputs, **options) for options in ({"sinks": sinks}, {}))
    assert (to_float64(results.pop("dsinks")) == 0).all()
    for name, x in plain.items():
        # The same weights by other kernels; other tests compare both with float64.
        numpy.testing.assert_allclose(
            *(y.get() if hasattr(y, "get") else y for y in map(to_float64, (results[name], x))),
            rtol=1e-3, atol=1e-3, err_msg=name,
        )  # fmt: skip


@each()
def test_rows_without_a_key(target):
    """out is 0 and the LSE is the sink; such rows add nothing to any gradient."""
    inputs = target.inputs("float16", seqlen_q=150, seqlen_k=20)
    sinks = make_sinks(target)
    results = forward_backward(inputs, sinks=sinks, causal=True)
    assert (to_float64(results["out"])[:, :130] == 0).all()
    assert (to_float64(results["dq"])[:, :130] == 0).all()
    # The sink itself but for its way through log2 and back, whatever the scores of other rows.
    error = to_float64(results["lse"])[..., :130] - to_float64(sinks)[:, None]
    assert float(abs(error).max()) < 1e-5
    expected(inputs, sinks=sinks, causal=True).check(**results)


@each()
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 5), (5, 0)])
def test_empty(target, seqlen_q, seqlen_k):
    inputs = target.inputs("float16", seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    results = forward_backward(inputs, sinks=make_sinks(target))
    assert (to_float64(results["dsinks"]) == 0).all() and (to_float64(results["out"]) == 0).all()


@each()
def test_packed_sequences(target):
    lengths = [1, 130, 0, 64]
    inputs = target.varlen_inputs("float16", lengths, heads_kv=2)
    sinks = make_sinks(target)
    options = (True, None, None, 0.0, "thd", (130, 130), 0.0, False)
    extras = Extras(inputs.cu_seqlens_q, inputs.cu_seqlens_k, sinks=sinks)
    qkv = inputs.q, inputs.k, inputs.v
    out, lse = FORWARD("f", (*qkv, *extras), (options, True))
    arrays = (inputs.dout, *qkv, out, lse, None, *extras)
    dq, dk, dv, _, dsinks = BACKWARD("f", arrays, (options, False))
    exact = expected(inputs, sinks=sinks, causal=True)
    exact.check(out=out, lse=lse, dq=dq, dk=dk, dv=dv, dsinks=dsinks)


@each(device="cuda")
def test_gradient_is_bitwise_repeatable(target):
    inputs = target.inputs("float16", batch=3, seqlen_q=1000, heads_q=8)
    sinks = make_sinks(target, heads=8)
    first, second = (forward_backward(inputs, sinks=sinks)["dsinks"] for _ in range(2))
    assert (first == second).all()


# Bad input -----------------------------------------------------------------------------------


@each()
@pytest.mark.parametrize("shape", [(3,), (1,), (2, 4), ()], ids=str)
def test_shape(target, shape):
    inputs, sinks = (
        target.inputs("float16", seqlen_q=5),
        target.array(numpy.ones(shape), "float32"),
    )
    with pytest.raises(ValueError, match=r"^attention: sinks must have shape \(4,\) .*got \("):
        cupyflash.attention(inputs.q, inputs.k, inputs.v, sinks=sinks)


@each()
def test_dtype(target):
    inputs, sinks = target.inputs("float16", seqlen_q=5), target.array(numpy.ones(4))
    with pytest.raises(
        TypeError, match="^attention: sinks must be float32 or float16 like q, got float64"
    ):
        cupyflash.attention(inputs.q, inputs.k, inputs.v, sinks=sinks)
