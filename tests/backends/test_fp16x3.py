"""float32 attention by three float16 products: data of any range, and the precision that is asked.

Its results on ordinary data are tested where the other backends are, by the same cases.
"""

import numpy
import pytest
from matrix import select
from targets import has

import cupyflash
from cupyflash import environment
from cupyflash.testing import expected, to_float64

TARGETS = [x for x in select(device="cuda") if x.missing or x.backend == "fp16x3"]
each_target = pytest.mark.parametrize("target", TARGETS, indirect=True, ids=lambda x: x.name)
SHAPE = {"batch": 2, "seqlen_q": 300, "seqlen_k": 300, "heads_q": 4, "heads_kv": 2, "head_dim": 64}


def both_passes(q, k, v, dout, **options):
    """{name: array} of out, lse, dq, dk and dv."""
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients)))


def tensors(inputs):
    return inputs.q, inputs.k, inputs.v, inputs.dout


def scaled(**factors):
    """Multiplies rows of a tensor by a factor: ``k=(slice, factor)``."""

    def change(inputs):
        for name, (rows, factor) in factors.items():
            getattr(inputs, name)[:, rows] *= factor

    return change


ALL, EVERY_50TH = slice(None), slice(None, None, 50)
RANGES = {
    "small and large together": scaled(q=(ALL, 1e-30), k=(ALL, 1e30)),
    "all small": scaled(v=(ALL, 1e-12), dout=(ALL, 1e-10)),
    "all large": scaled(v=(ALL, 1e8), dout=(ALL, 1e6)),
    "rows of 1e-30 and 1e9": scaled(v=(slice(0, 150), 1e-30), dout=(slice(100, 200), 1e9)),
    "a small first row": scaled(v=(slice(0, 1), 1e-7), k=(slice(0, 1), 1e-12)),
    "outliers of 1e3": scaled(v=(EVERY_50TH, 1e3), dout=(EVERY_50TH, 1e3)),
    "rows of zeros": scaled(k=(slice(0, 9), 0.0), v=(slice(3, 70), 0.0), dout=(slice(0, 64), 0.0)),
    "all zeros": scaled(q=(ALL, 0.0), dout=(ALL, 0.0)),
    "scores of +-80": scaled(q=(ALL, 8.0), k=(ALL, 1.5)),
}


@each_target
@pytest.mark.parametrize("change", RANGES.values(), ids=RANGES)
def test_range(target, change):
    """Accurate as float32 arithmetic is, and each row of out is so by itself."""
    inputs = target.inputs("float32", **SHAPE)
    change(inputs)
    found = both_passes(*tensors(inputs), causal=True)
    wanted = expected(inputs, causal=True)
    wanted.check(**found)
    error = abs(to_float64(found["out"]) - to_float64(wanted.results["out"].exact)).max(-1)
    size = abs(to_float64(wanted.results["out"].exact)).max(-1)
    assert (error <= 1e-4 * size).all()


@each_target
@pytest.mark.parametrize("head_dim", [64, 128])
def test_outliers_leave_the_other_rows_their_digits(target, head_dim):
    """One scale of dS serves rows whose gradients differ by 1000."""
    shape = {"batch": 1, "seqlen_q": 1024, "seqlen_k": 1024, "heads_q": 2, "heads_kv": 2}
    inputs = target.inputs("float32", **shape, head_dim=head_dim)
    scaled(v=(slice(None, None, 64), 1e3), dout=(slice(None, None, 64), 1e3))(inputs)
    found = both_passes(*tensors(inputs))
    exact = expected(inputs).results
    others = numpy.arange(1024) % 64 != 0
    for name in ("dq", "dk"):
        right = to_float64(exact[name].exact)[:, others]
        error = to_float64(found[name])[:, others] - right
        assert (error**2).mean() ** 0.5 <= 3e-6 * (right**2).mean() ** 0.5, name


@each_target
@pytest.mark.parametrize("bad", [numpy.inf, -numpy.inf, numpy.nan])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_infinities_and_nan(target, name, bad):
    """They appear where they do on CUDA cores, and the other sequence keeps its bits."""
    inputs = target.inputs("float32", **SHAPE)
    before = both_passes(*tensors(inputs), causal=True, deterministic=True)
    getattr(inputs, name)[0, 100, 0, 5] = bad
    found = both_passes(*tensors(inputs), causal=True, deterministic=True)
    with environment.override(backend="simt"):
        simt = both_passes(*tensors(inputs), causal=True)
    for name, x in found.items():
        x, like, other = to_float64(x), to_float64(simt[name]), to_float64(before[name])
        assert (numpy.isnan(x) == numpy.isnan(like)).all(), name
        assert (x[1] == other[1]).all(), name


@each_target
def test_rows_beyond_the_lengths_are_not_read(target):
    """Not even for the range: NaN there leaves every bit as it is."""
    inputs = target.inputs("float32", **SHAPE)
    lengths = target.array(numpy.array([300, 200], "int32"))
    options = {"seqused_q": lengths, "seqused_k": lengths, "deterministic": True}
    before = both_passes(*tensors(inputs), **options)
    for x in tensors(inputs):
        x[1, 200:] = numpy.nan
    after = both_passes(*tensors(inputs), **options)
    for name, x in before.items():
        assert (to_float64(x) == to_float64(after[name])).all(), name


@each_target
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_repeats(target, head_dim):
    """Equal calls give equal bits; dq does so where that is asked for."""
    shape = {"batch": 2, "seqlen_q": 1000, "seqlen_k": 700, "heads_q": 8, "head_dim": head_dim}
    inputs = target.inputs("float32", **shape)
    first = both_passes(*tensors(inputs), deterministic=True)
    for number in range(20):
        again = both_passes(*tensors(inputs), deterministic=number % 2 == 0)
        for name, x in again.items():
            if name != "dq" or number % 2 == 0:
                assert (to_float64(x) == to_float64(first[name])).all(), (name, number)


@each_target
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tf32_is_less_accurate_and_only_where_asked(target, head_dim):
    """One product has factors of 11 bits; what torch allows globally changes nothing."""
    inputs = target.inputs("float32", **SHAPE | {"head_dim": head_dim})
    ieee = both_passes(*tensors(inputs))
    tf32 = both_passes(*tensors(inputs), precision="tf32")
    wanted = expected(inputs)
    wanted.check(**ieee)
    for name in ("out", "dq", "dk", "dv"):
        exact = to_float64(wanted.results[name].exact)
        errors = [abs(to_float64(x[name]) - exact).max() / abs(exact).max() for x in (ieee, tf32)]
        assert errors[0] < 1e-5 and 1e-5 < errors[1] < 1e-2, (name, errors)
    if target.library == "torch":
        import torch

        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            again = cupyflash.attention(*tensors(inputs)[:3])
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        assert (to_float64(again) == to_float64(ieee["out"])).all()


@pytest.mark.parametrize("target", TARGETS, indirect=True, ids=lambda x: x.name)
def test_gradients_are_those_of_finite_differences(target):
    if target.library != "torch":
        pytest.skip("torch.autograd.gradcheck is for torch tensors")
    import torch

    inputs = target.inputs("float32", **SHAPE | {"batch": 1, "seqlen_q": 9, "seqlen_k": 13})
    qkv = [x.detach().requires_grad_() for x in tensors(inputs)[:3]]
    assert torch.autograd.gradcheck(
        lambda *x: cupyflash.attention(*x, causal=True),
        qkv,
        eps=1e-2,
        atol=2e-3,
        rtol=2e-3,
        fast_mode=True,
        nondet_tol=1e-5,
    )


@pytest.mark.skipif(not has("torch"), reason="needs torch")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tf32_is_for_float32(dtype):
    import torch

    x = torch.zeros(1, 4, 2, 32, dtype=getattr(torch, dtype))
    with pytest.raises(ValueError, match="^attention: precision 'tf32' is for float32 .*, got "):
        cupyflash.attention(x, x, x, precision="tf32")
    with pytest.raises(ValueError, match="^attention: precision must be 'ieee' or 'tf32', got bf"):
        cupyflash.attention(x, x, x, precision="bf16")
    with pytest.raises(TypeError, match="^attention: precision must be 'ieee' or 'tf32', got 3"):
        cupyflash.attention(x, x, x, precision=3)
