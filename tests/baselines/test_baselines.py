"""The baselines: right on the GPU, and errors that name the mistake everywhere."""

import numpy
import pytest
from arrays import normal, stored
from matrix import each_library
from wrong_calls import FLAG, NOT_IN_FLOAT32, NUMBER

from cupyflash.ops.baselines import baselines
from cupyflash.testing import assert_close_to_float64, expected, poison_free_memory, to_float64

attentions = pytest.mark.parametrize(
    "attention",
    [baselines.naive_attention, baselines.fused_attention, baselines.flash_attention_1],
    ids=lambda f: f.__name__,
)


@each_library(device="cuda")
@pytest.mark.parametrize("shape", [(1,), (257,), (3, 0), (17, 1001)], ids=str)
def test_vector_add(target, shape):
    for dtype in target.dtypes:
        a, b = (stored(target, normal(shape, i), dtype) for i in (0, 1))
        out = baselines.vector_add(a, b)
        assert type(out) is type(a) and out.dtype == a.dtype
        baseline = to_float64(a + b)
        exact = to_float64(a) + to_float64(b)
        assert_close_to_float64(out, exact, baseline, dtype, "out")


@each_library(device="cuda")
@attentions
@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (113, 40), (40, 113), (200, 200)], ids=str)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 128, 256])
def test_attention(target, attention, lengths, head_dim):
    """Queries that see no key are among the causal ones."""
    for dtype, causal in zip(target.dtypes * 2, (False, True) * len(target.dtypes)):
        inputs = target.inputs(
            dtype, batch=2, seqlen_q=lengths[0], seqlen_k=lengths[1], heads_q=3, head_dim=head_dim
        )
        qkv = inputs.q, inputs.k, inputs.v
        size = int(numpy.prod(inputs.q.shape)) * (4 if dtype == "float32" else 2)
        poison_free_memory(target.library, target.device, [size])
        scale = 0.5 / head_dim**0.5
        out = attention(*qkv, scale=scale, causal=causal)
        expected(inputs, causal=causal, scale=scale).check(out=out)


@each_library(device="cuda")
@attentions
def test_empty(target, attention):
    make = lambda *shape: stored(target, numpy.zeros(shape), "float32")
    assert tuple(attention(*[make(0, 5, 2, 8)] * 3).shape) == (0, 5, 2, 8)
    out = attention(make(1, 5, 2, 8) + 1, make(1, 0, 2, 8), make(1, 0, 2, 8))
    assert tuple(out.shape) == (1, 5, 2, 8) and not to_float64(out).any()


@each_library()
def test_bad_input_of_vector_add(target):
    make = lambda shape, dtype="float32": stored(target, normal(shape, 3), dtype)
    for error, match, a, b in [
        (TypeError, "a must be a CuPy array or a torch tensor, got list", [1.0], [1.0]),
        (TypeError, "b must be a .*list", make(3), [1.0] * 3),
        (TypeError, "b must be float32 like a, got float16", make(3), make(3, "float16")),
        (ValueError, r"b must have shape \(3,\) for \(\.\.\.,\), got \(4,\)", make(3), make(4)),
        (ValueError, r"a must be contiguous, got strides \(2,\)", make(6)[::2], make(3)),
    ]:
        with pytest.raises(error, match=f"^vector_add: .*{match}"):
            baselines.vector_add(a, b)


@each_library()
@attentions
def test_bad_input_of_attention(target, attention):
    make = lambda *shape: stored(target, normal(shape, 3), "float32")
    q = make(2, 5, 3, 8)
    for match, k, v in [
        (r"k must .*\(batch, seqlen_k, heads, head_dim\), got \(5, 3, 8\)", q[0], q[0]),
        (r"v must have shape \(2, 5, 3, 8\) .*got \(2, 6, 3, 8\)", q, make(2, 6, 3, 8)),
        (
            r"k must have shape \(2, seqlen_k, 3, 8\) .*got \(2, 5, 1, 8\)",
            make(2, 5, 1, 8),
            make(2, 5, 1, 8),
        ),
        (r"v must be contiguous", q, make(2, 5, 3, 16)[..., ::2]),
    ]:
        with pytest.raises(ValueError, match=f"^{attention.__name__}: .*{match}"):
            attention(q, k, v)


@each_library()
@attentions
@pytest.mark.parametrize("name", ["scale", "causal"])
def test_bad_options_of_attention(target, attention, name):
    """They are refused before the place of the arrays is."""
    q = stored(target, normal((1, 5, 3, 8), 0), "float32")
    wrong = (*NUMBER, *NOT_IN_FLOAT32, 0, -1.0) if name == "scale" else FLAG
    for value in (*wrong, q):
        with pytest.raises((TypeError, ValueError), match=f"^{attention.__name__}: {name} must be"):
            attention(q, q, q, **{name: value})


@each_library(device="cpu")
@attentions
def test_there_is_no_cpu_path(target, attention):
    q = stored(target, normal((1, 5, 3, 8), 0), "float32")
    with pytest.raises(NotImplementedError, match="must be on a GPU, got a .* on the CPU"):
        attention(q, q, q)


@each_library(library="torch", device="cuda")
@attentions
def test_there_is_no_gradient(target, attention):
    q = stored(target, normal((1, 5, 3, 8), 0), "float32").requires_grad_()
    with pytest.raises(NotImplementedError, match="has no backward"):
        attention(q, q, q)


@each_library(device="cuda")
@pytest.mark.parametrize(
    "attention", [baselines.fused_attention, baselines.flash_attention_1], ids=lambda f: f.__name__
)
def test_head_dims_that_a_warp_cannot_hold(target, attention):
    q = stored(target, normal((1, 2, 1, 264), 0), "float32")
    match = f"^{attention.__name__}: head_dim must be at most 256, got 264"
    with pytest.raises(ValueError, match=match):
        attention(q, q, q)
