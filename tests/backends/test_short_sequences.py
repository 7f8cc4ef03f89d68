"""Sequences of one tile, and head dims up to 32: kernels of their own, and where they are taken."""

import numpy
import pytest
from fakes import fresh_plans
from matrix import each
from passes import forward_backward

import cupyflash
from cupyflash import environment
from cupyflash.ops.attention import dispatch
from cupyflash.ops.attention.checks import check
from cupyflash.ops.attention.options import Options
from cupyflash.ops.attention.problem import Features, Kind
from cupyflash.ops.attention.sm80 import forward as sm80
from cupyflash.ops.attention.sm80 import short as sm80_short
from cupyflash.ops.attention.sm80.backward import backward_kernels
from cupyflash.ops.attention.sm90 import backward as sm90_backward
from cupyflash.ops.attention.sm90 import forward as sm90
from cupyflash.runtime.array import View
from cupyflash.testing import Inputs, expected, to_float64, to_numpy64

LENGTHS = [(49, 49), (64, 64), (1, 63), (33, 5), (64, 17)]
OPTIONS = [{}, {"causal": True}, {"causal": "top-left", "scale": 0.3}, {"window": (7, 3)}]


@pytest.mark.parametrize(
    ("seqlens", "heads", "one_tile", "one_pass"),
    [
        ((64, 64), (4, 4), True, True),
        ((49, 64), (4, 2), True, False),
        ((65, 64), (4, 4), False, False),
        ((1, 77), (4, 4), False, False),
    ],
)
def test_features(seqlens, heads, one_tile, one_pass):
    features = features_of(*seqlens, heads)
    assert (features.one_tile, features.one_pass) == (one_tile, one_pass)


def features_of(seqlen_q, seqlen_k, heads=(1, 1)):
    q, k = (
        View((2, n, h, 32), (n * h * 32, h * 32, 32, 1), "float16", 0)
        for n, h in zip((seqlen_q, seqlen_k), heads)
    )
    options = Options()
    return check("f", {"q": q, "k": k, "v": k}, options).features


def hopper(head_dim, features):
    return Kind("float16", head_dim, features, (9, 0))


def test_tiles():
    """The least padding for short sequences, and columns for heads of 32 on both backends."""
    short = Features(short=4)
    for seqlen, rows in ((128, 128), (192, 192), (256, 128), (384, 192), (512, 128)):
        features = features_of(seqlen, seqlen)
        assert sm90.forward_kernel(hopper(64, features)).block_m == rows
    for seqlen_k, columns in ((77, 80), (80, 80), (81, 128)):
        features = features_of(512, seqlen_k)
        assert sm90.forward_kernel(hopper(40, features)).block_n == columns
    for head_dim, columns in ((8, 32), (32, 32), (40, 64)):
        kind = hopper(head_dim, short)
        assert sm90.forward_kernel(kind).head_dim == columns
        assert sm90_backward.backward_kernels(kind)[1].head_dim == columns
        assert sm80.forward_kernel(kind).head_dim == columns


@pytest.mark.parametrize(
    ("batch", "heads", "blocks"), [(3, 4, 12), (1024, 1, 1024), (4096, 4, 1024), (5000, 4, 1252)]
)
def test_sequences_of_a_block(batch, heads, blocks):
    features = Features(one_pass=True, one_tile=True, bias=1)
    (config,) = backward_kernels(Kind("float16", 32, features, (8, 0)))
    shape = sm80_short.structs.AttentionShape(batch, heads, heads, 49, 49, 32)
    assert config.grid(shape) == blocks and blocks % heads == 0


@pytest.mark.parametrize(
    ("capability", "head_dim", "has_kernel"),
    [((9, 0), 128, True), ((9, 0), 136, False), ((8, 6), 96, True), ((8, 6), 104, False)],
)
def test_one_pass_needs_shared_memory(capability, head_dim, has_kernel):
    features = Features(one_pass=True, one_tile=True)
    assert sm80_short.supports(Kind("float16", head_dim, features, capability)) == has_kernel


@each()
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 56, 64, 80, 128])
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_one_tile(target, seqlens, head_dim, options):
    lengths = dict(zip(("seqlen_q", "seqlen_k"), seqlens))
    inputs = target.inputs(target.dtypes[-1], batch=3, heads_q=2, head_dim=head_dim, **lengths)
    expected(inputs, **options).check(**forward_backward(inputs, **options))


@each()
@pytest.mark.parametrize("kind", ["q", "float32", "bool"])
@pytest.mark.parametrize("shape", [(2, 49, 51), (5, 1, 49, 51), (5, 2, 49, 51), (49, 1)], ids=str)
@pytest.mark.parametrize("sequences", [1, 3])
def test_bias(target, monkeypatch, shape, kind, sequences):
    """One of the whole batch, whose gradient each block sums over its sequences, and others."""
    monkeypatch.setattr(sm80_short, "MANY_BLOCKS", 5 * 2 // sequences)
    fresh_plans(monkeypatch, dispatch)
    inputs = target.inputs(
        target.dtypes[0], batch=5, heads_q=2, seqlen_q=49, seqlen_k=51, head_dim=32
    )
    values = numpy.random.default_rng(7).standard_normal(shape, "float32")
    bias = target.array(values > -0.7) if kind == "bool" else None
    if bias is None:
        bias = target.array(values, target.dtypes[0] if kind == "q" else kind)
    expected(inputs, bias=bias).check(**forward_backward(inputs, bias=bias))


@each(library="torch")
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("head_dim", [32, 72, 120])
def test_packed(target, head_dim, options):
    """Some sequences have no queries, or no keys."""
    import torch

    lengths = [49, 0, 64, 1, 30, 0], [49, 7, 0, 64, 31, 0]
    heads = {"heads_q": 2, "heads_kv": 2, "head_dim": head_dim}
    inputs = target.varlen_inputs(target.dtypes[0], *lengths, **heads)
    qkv = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = cupyflash.flash_attn_varlen_func(
        *qkv, inputs.cu_seqlens_q, inputs.cu_seqlens_k, 64, 64, **options
    )
    dq, dk, dv = torch.autograd.grad(out, qkv, inputs.dout)
    expected(inputs, **options).check(out=out.detach(), dq=dq, dk=dk, dv=dv)


@each()
def test_used_lengths_with_a_bias(target):
    """Rows and columns of the bias behind the end of every sequence are read, but not used."""
    used = {"seqused_q": [60, 0, 33, 1, 50], "seqused_k": [62, 5, 0, 30, 49]}
    inputs = target.inputs(
        target.dtypes[0], batch=5, heads_q=2, seqlen_q=62, seqlen_k=64, head_dim=32
    )
    values = numpy.random.default_rng(8).standard_normal((2, 62, 64), "float32")
    bias = target.array(values, "float32")
    options = {name: target.array(numpy.array(x, "int32")) for name, x in used.items()}
    results = forward_backward(inputs, bias=bias, **options)
    total = numpy.zeros(values.shape)
    for b, (rows, cols) in enumerate(zip(*used.values())):
        ends = (rows, cols, cols, rows)
        parts = [
            x[b : b + 1, :n] for x, n in zip((inputs.q, inputs.k, inputs.v, inputs.dout), ends)
        ]
        one = expected(Inputs(*parts, inputs.dtype), bias=bias[:, :rows, :cols])
        names = {"out": rows, "dq": rows, "dk": cols, "dv": cols}
        one.check(**{name: results[name][b : b + 1, :n] for name, n in names.items()})
        total[:, :rows, :cols] += to_numpy64(one.results["dbias"].exact)
    error = abs(to_numpy64(results["dbias"]) - total).max()
    assert error < 4e-3 * abs(total).max()  # dS is summed in float32, before it is rounded


@each(device="cuda", library="cupy")
def test_gradient_of_the_lse_and_an_unaligned_out(target):
    import cupy

    inputs = target.inputs("float16", batch=2, heads_q=2, seqlen_q=50, seqlen_k=60, head_dim=32)
    out, lse = cupyflash.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    storage = cupy.empty(out.size + 1, out.dtype)
    moved = storage[1:].reshape(out.shape)
    moved[...] = out
    arguments = inputs.dout, inputs.q, inputs.k, inputs.v
    first = cupyflash.attention_backward(*arguments, out, lse, dlse=lse)
    second = cupyflash.attention_backward(*arguments, moved, lse, dlse=lse)
    with environment.override(backend="simt"):
        exact = cupyflash.attention_backward(*arguments, out, lse, dlse=lse)
    for a, b, c in zip(first[:3], second[:3], exact[:3]):
        a, b, c = map(to_float64, (a, b, c))
        assert abs(a - b).max() < 2e-3 * abs(a).max()  # atomics may have added up dq
        assert abs(a - c).max() < 0.01 * abs(c).max()


@each(device="cuda")
def test_deterministic_gradient_of_a_shared_bias(target):
    """The same bits in every run, so not from the kernel that adds to it by atomics."""
    if not target.aligned_only:
        pytest.skip("this backend refuses it")
    inputs = target.inputs(
        target.dtypes[0], batch=40, heads_q=2, seqlen_q=49, seqlen_k=49, head_dim=32
    )
    bias = target.array(numpy.random.default_rng(9).standard_normal((2, 49, 49), "float32"))
    out, lse = cupyflash.attention(inputs.q, inputs.k, inputs.v, bias=bias, return_lse=True)
    runs = [
        cupyflash.attention_backward(
            inputs.dout, inputs.q, inputs.k, inputs.v, out, lse,
            bias=bias, bias_grad=True, deterministic=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    names = dict(zip(("dq", "dk", "dv", "dbias"), runs[0]))
    expected(inputs, bias=bias).check(**names)
    for run in runs[1:]:
        assert all((to_float64(a) == to_float64(b)).all() for a, b in zip(run[:4], runs[0]))
