"""Sequences that end before their tensors do: seqused_q and seqused_k."""

import contextlib
import functools
import operator

import numpy
import pytest
from matrix import each
from passes import forward_backward
from targets import boolean_texts

import cupyflash
from cupyflash import environment
from cupyflash.testing import Expected, Inputs, expected, poison_free_memory, to_float64

ROWS, COLS = 150, 200
LENGTHS = {
    "both": ([150, 1, 77, 0, 64], [3, 200, 64, 90, 0]),
    "queries": ([150, 1, 77, 0, 64], None),
    "keys": (None, [3, 200, 64, 90, 0]),
}


def problem(target, lengths, layout="bshd", dtype=None):
    """Inputs whose rows behind the lengths are NaN, the lengths as options, and as numbers."""
    used = [x or [size] * 5 for x, size in zip(lengths, (ROWS, COLS))]
    inputs = target.inputs(
        dtype or target.dtypes[0], batch=5, seqlen_q=ROWS, seqlen_k=COLS, heads_kv=2, layout=layout
    )
    for x, ends in zip(
        (inputs.q, inputs.dout, inputs.k, inputs.v), (used[0],) * 2 + (used[1],) * 2
    ):
        for b, end in enumerate(ends):
            _rows(x, layout, b)[end:] = float("nan")
    options = {
        name: target.array(numpy.array(x, "int32"))
        for name, x in zip(("seqused_q", "seqused_k"), lengths)
        if x is not None
    }
    return inputs, options, list(zip(*used))


def _rows(x, layout, b):
    """View (rows, heads, head_dim) of one sequence."""
    return x[b].swapaxes(0, 1) if layout == "bhsd" else x[b]


def of_sequence(inputs, b, rows, cols):
    """Sequence b alone, without what lies behind its ends."""
    parts = [
        _rows(x, inputs.layout, b)[None, :end]
        for x, end in zip((inputs.q, inputs.k, inputs.v, inputs.dout), (rows, cols, cols, rows))
    ]
    return Inputs(*parts, inputs.dtype)


@each()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top-left", "layout": "bhsd"},
        {"window": (30, 5), "softcap": 4.0},
        {"layout": "bhsd", "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", LENGTHS)
def test_is_sequence_by_sequence(target, name, options):
    """Rows behind the end are not read; there out and gradients are 0 and the LSE is -inf."""
    options = dict(options)
    layout = options.pop("layout", "bshd")
    inputs, lengths, ends = problem(target, LENGTHS[name], layout)
    size = inputs.q.nbytes
    poison_free_memory(target.library, target.device, [size, inputs.k.nbytes, 2 * size])
    results = forward_backward(inputs, **lengths, **options)
    for b, (rows, cols) in enumerate(ends):
        one = {}
        for key, x in results.items():
            if key == "lse":
                assert (to_float64(x[b, :, rows:]) == -numpy.inf).all()
                one[key] = x[b : b + 1, :, :rows]
                continue
            end = cols if key in ("dk", "dv") else rows
            assert (to_float64(_rows(x, layout, b)[end:]) == 0).all(), key
            one[key] = _rows(x, layout, b)[None, :end]
        expected(of_sequence(inputs, b, rows, cols), **options).check(**one)


@each()
@pytest.mark.parametrize("shared", [False, True], ids=["of each sequence", "shared"])
def test_with_a_boolean_bias(target, shared):
    """Also as a text, whose tiles end with each sequence."""
    inputs, lengths, ends = problem(target, LENGTHS["both"])
    seen = numpy.random.default_rng(9).random((1 if shared else 5, 1, ROWS, COLS)) < 0.5
    bias = target.array(seen)
    for scope in (boolean_texts(), contextlib.nullcontext()):
        with scope:
            results = forward_backward(inputs, bias=bias, causal=True, **lengths)
        for b, (rows, cols) in enumerate(ends):
            part = bias[0 if shared else b][None, :, :rows, :cols]
            exact = expected(of_sequence(inputs, b, rows, cols), bias=part, causal=True)
            one = {name: results[name][b : b + 1, :rows] for name in ("out", "dq")}
            one |= {name: results[name][b : b + 1, :cols] for name in ("dk", "dv")}
            exact.check(lse=results["lse"][b : b + 1, :, :rows], **one)


@each()
@pytest.mark.parametrize("dtype", ["q", "float32"])
def test_with_bias_and_sinks(target, dtype):
    inputs, lengths, ends = problem(target, LENGTHS["both"])
    rng = numpy.random.default_rng(8)
    values = rng.standard_normal((5, 4, ROWS, COLS), dtype="float32")
    for b, (rows, cols) in enumerate(ends):  # not read either
        values[b, :, rows:] = values[b, :, :, cols:] = numpy.nan
    bias = target.array(values, target.dtypes[0] if dtype == "q" else dtype)
    sinks = target.array(rng.standard_normal(4, dtype="float32"))
    results = forward_backward(inputs, bias=bias, sinks=sinks, causal=True, **lengths)
    of_sinks = []
    for b, (rows, cols) in enumerate(ends):
        part = bias[b : b + 1, :, :rows, :cols]
        exact = expected(of_sequence(inputs, b, rows, cols), bias=part, sinks=sinks, causal=True)
        of_sinks.append(exact.results["dsinks"])
        exact.check(
            out=results["out"][b : b + 1, :rows],
            dq=results["dq"][b : b + 1, :rows],
            dk=results["dk"][b : b + 1, :cols],
            dbias=results["dbias"][b : b + 1, :, :rows, :cols],
        )
        assert (to_float64(results["dbias"])[b, :, rows:] == 0).all()
        assert (to_float64(results["dbias"])[b, :, :, cols:] == 0).all()
    whole = functools.reduce(operator.add, of_sinks)
    Expected({"dsinks": whole}).check(dsinks=results["dsinks"])


@each()
def test_with_dropout(target):
    """A weight keeps its place: the mask is that of the whole tensors."""
    inputs, lengths, ends = problem(target, ([150] * 5, [120] * 5))
    options = {"dropout_p": 0.4, "dropout_seed": 5}
    results = forward_backward(inputs, **lengths, **options)
    short = [x[:, :120] for x in (inputs.k, inputs.v)]
    alone = Inputs(inputs.q, *short, inputs.dout, inputs.dtype)
    exact = expected(alone, **options)
    exact.check(out=results["out"], dq=results["dq"], dv=results["dv"][:, :120])


@each(library="torch")
def test_frozen_lengths_have_no_gradient(target):
    inputs, lengths, _ = problem(target, LENGTHS["both"])
    q = inputs.q.detach().requires_grad_()
    cupyflash.attention(q, inputs.k, inputs.v, **lengths).sum().backward()
    assert (q.grad[1, 1:] == 0).all() and (q.grad[3] == 0).all()


# Bad input -----------------------------------------------------------------------------------


def rejects(target, error, match, name, values, dtype="int32"):
    inputs, _, _ = problem(target, LENGTHS["both"])
    lengths = target.array(numpy.array(values, dtype))
    with environment.override(debug=True), pytest.raises(error, match=match):
        cupyflash.attention(inputs.q, inputs.k, inputs.v, **{name: lengths})


@each()
@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_bad_lengths(target, name):
    """The values on a GPU only with debug on, as reading them costs a synchronisation."""
    rejects(
        target, TypeError, f"^attention: {name} must be int32, got int64", name, [1] * 5, "int64"
    )
    rejects(
        target, ValueError, rf"^attention: {name} must have shape \(5,\) .*\(4,\)", name, [1] * 4
    )
    rejects(target, ValueError, f"^attention: {name} must be from 0 to", name, [1, 2, 3, 4, 201])
    rejects(target, ValueError, f"^attention: {name} must be from 0 to", name, [1, 2, -3, 4, 0])
