"""The oracle itself: against Python loops, finite differences, other tiles, and torch."""

import math
import warnings

import numpy
import pytest
from arrays import assert_same_oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash.ops.attention.reference import (
    attention_tiled,
    attention_tiled_backward,
    attention_varlen,
    attention_varlen_backward,
)

OPTIONS = [
    {},
    {"causal": True},
    {"causal": "bottom-right", "scale": 0.3},
    {"causal": "top-left"},
    {"window": (2, 1)},
    {"window": (None, 2)},
    {"window": (1, -1), "causal": "top-left"},
    {"window": (0, 0)},
    {"window": (3, 3), "causal": True, "softcap": 2.0},
    {"softcap": 0.7},
]
SHAPES = [  # batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim
    (2, 5, 5, 2, 2, 8),
    (1, 3, 7, 4, 2, 8),
    (1, 7, 3, 3, 1, 8),
    (1, 1, 1, 1, 1, 8),
]


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def make(batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, dtype="float64"):
    """dout, q, k, v and slopes (batch, heads_q)."""
    rng = numpy.random.default_rng(0)
    shape_q = (batch, seqlen_q, heads_q, head_dim)
    shape_k = (batch, seqlen_k, heads_kv, head_dim)
    tensors = [rng.standard_normal(s).astype(dtype) for s in (shape_q, shape_q, shape_k, shape_k)]
    return *tensors, rng.random((batch, heads_q))


def extras_of(name, shape):
    """Options for a problem of this shape: an array each, or dropout."""
    batch, seqlen_q, seqlen_k, heads_q, _, _ = shape
    rng = numpy.random.default_rng(3)
    return {
        "": {},
        "bias": {"bias": rng.standard_normal((batch, heads_q, seqlen_q, seqlen_k))},
        "bias-head": {"bias": rng.standard_normal((heads_q, 1, seqlen_k))},
        "bias-row": {"bias": rng.standard_normal((batch, 1, seqlen_q, 1))},
        "mask": {"bias": rng.random((seqlen_q, seqlen_k)) < 0.5},
        "sinks": {"sinks": rng.standard_normal(heads_q)},
        "dropout": {"dropout_p": 0.3, "dropout_seed": 2**40 + 5},
        "all": {
            "bias": rng.standard_normal((1, 1, seqlen_q, seqlen_k)),
            "sinks": rng.standard_normal(heads_q),
            "dropout_p": 0.3,
        },
    }[name]


ONE_TILE = 64  # rows and columns; no problem here has more
EXTRAS = ("", "bias", "bias-head", "bias-row", "mask", "sinks", "dropout", "all")


def loops(
    q, k, v, *, causal=False, scale=None, window=None, softcap=0.0, alibi_slopes=None, bias=None,
    sinks=None, dropout_p=0.0, dropout_seed=0,
):  # fmt: skip
    """The definition, one scalar at a time."""
    (batch, seqlen_q, heads_q, head_dim), (_, seqlen_k, heads_kv, _) = q.shape, k.shape
    out, lse = numpy.zeros(q.shape), numpy.full((batch, heads_q, seqlen_q), -numpy.inf)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    left, right = window or (-1, -1)
    diagonal = 0 if causal == "top-left" else seqlen_k - seqlen_q
    if bias is not None:
        bias = numpy.where(bias, 0.0, -numpy.inf) if bias.dtype == bool else bias
        bias = numpy.broadcast_to(bias, (batch, heads_q, seqlen_q, seqlen_k))
    for b, h, i in numpy.ndindex(batch, heads_q, seqlen_q):
        kv_head, scores = h // (heads_q // heads_kv), {}
        for j in range(seqlen_k):
            distance = j - (i + diagonal)
            if causal and distance > 0:
                continue
            if left not in (None, -1) and distance < -left:
                continue
            if right not in (None, -1) and distance > right:
                continue
            s = scale * float(numpy.dot(q[b, i, h], k[b, j, kv_head]))
            s = softcap * math.tanh(s / softcap) if softcap else s
            s -= 0 if alibi_slopes is None else alibi_slopes[b, h] * abs(distance)
            s += 0 if bias is None else bias[b, h, i, j]
            if s > -math.inf:
                scores[j] = s
        all_scores = [*scores.values(), *([] if sinks is None else [sinks[h]])]
        if all_scores:
            lse[b, h, i] = math.log(sum(map(math.exp, all_scores)))
        for j, s in scores.items():
            p = math.exp(s - lse[b, h, i])
            if not random_bits(dropout_seed, b * heads_q + h, i, j) >= round(dropout_p * 2**16):
                continue
            out[b, i, h] += p / (1 - round(dropout_p * 2**16) / 2**16) * v[b, j, kv_head]
    return out, lse


def random_bits(seed, z, row, col):
    """The 16 random bits of a weight, from the definition of Philox4x32-7."""
    a, b, c, d = row // 16 * 8 + row % 8, col // 16 * 4 + col // 2 % 4, z, 0
    low, high = seed % 2**32, seed >> 32
    for _ in range(7):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b = (right >> 32) ^ b ^ low, right % 2**32
        c, d = (left >> 32) ^ d ^ high, left % 2**32
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    word = (a, b, c, d)[row // 8 % 2 * 2 + col // 8 % 2]
    return word >> 16 if col % 2 else word % 2**16


def close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            assert_same_oracle(a, e)


def in_one_tile(q, k, v, **options):
    return attention_tiled(q, k, v, block=ONE_TILE, **options)


def backward_in_one_tile(dout, q, k, v, bias_grad=False, **options):
    """Also the forward, of which it needs the results."""
    options["block"] = ONE_TILE
    results = attention_tiled(q, k, v, **options)
    return attention_tiled_backward(dout, q, k, v, *results, bias_grad=bias_grad, **options)


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_tile_is_the_definition(shape, options, alibi):
    _, q, k, v, slopes = make(*shape)
    slopes = slopes if alibi else None
    close(
        in_one_tile(q, k, v, alibi_slopes=slopes, **options),
        loops(q, k, v, alibi_slopes=slopes, **options),
    )


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2]], ids=str)
def test_one_tile_with_extras_is_the_definition(shape, options, extras):
    _, q, k, v, slopes = make(*shape)
    options = options | extras_of(extras, shape) | {"alibi_slopes": slopes}
    close(in_one_tile(q, k, v, **options), loops(q, k, v, **options))


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2]], ids=str)
def test_gradients_are_finite_differences(shape, options, extras):
    dout, q, k, v, slopes = make(*shape)
    options = options | extras_of(extras, shape) | {"alibi_slopes": slopes}
    inputs = {"q": q, "k": k, "v": v, "bias": options.get("bias"), "sinks": options.get("sinks")}
    bias_grad = "bias" in options and options["bias"].dtype != bool
    gradients = backward_in_one_tile(dout, q, k, v, bias_grad=bias_grad, **options)
    rng, step = numpy.random.default_rng(1), 1e-5
    for name, gradient in zip(inputs, gradients):
        if gradient is None:
            continue
        direction = rng.standard_normal(gradient.shape)
        values = []
        for sign in (1, -1):
            moved = options | {"q": q, "k": k, "v": v}
            moved[name] = inputs[name] + sign * step * direction
            values.append((in_one_tile(**moved)[0] * dout).sum())
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx((gradient * direction).sum(), rel=1e-6, abs=1e-8)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tiles_do_not_matter(data):
    draw = data.draw
    heads_kv, group = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    lengths = st.integers(0, 40)
    shape = (draw(st.integers(0, 2)), draw(lengths), draw(lengths), heads_kv * group, heads_kv, 8)
    bounds = st.one_of(st.none(), st.integers(-1, 45))
    options = {
        "causal": draw(st.sampled_from([False, True, "bottom-right", "top-left"])),
        "scale": draw(st.sampled_from([None, 1.5])),
        "window": draw(st.one_of(st.none(), st.tuples(bounds, bounds))),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
    }
    dout, q, k, v, slopes = make(*shape)
    options["alibi_slopes"] = draw(st.sampled_from([None, slopes, numpy.arange(shape[3]) * 0.1]))
    options |= extras_of(draw(st.sampled_from(EXTRAS)), shape)
    bias_grad = "bias" in options and options["bias"].dtype != bool
    block = draw(st.sampled_from([1, 7, 16]))
    out, lse = attention_tiled(q, k, v, block=block, **options)
    close((out, lse), in_one_tile(q, k, v, **options))
    close(
        attention_tiled_backward(
            dout, q, k, v, out, lse, block=block, bias_grad=bias_grad, **options
        ),
        backward_in_one_tile(dout, q, k, v, bias_grad=bias_grad, **options),
    )


def test_rows_without_a_key_give_zero_and_minus_infinity():
    dout, q, k, v, _ = make(1, 6, 4, 2, 2, 8)
    out, lse = attention_tiled(q, k, v, causal=True)  # rows 0 and 1 lie before the first key
    assert (out[:, :2] == 0).all() and (lse[..., :2] == -numpy.inf).all()
    assert numpy.isfinite(out).all() and numpy.isfinite(lse[..., 2:]).all()
    for gradient in attention_tiled_backward(dout, q, k, v, out, lse, causal=True)[:3]:
        assert numpy.isfinite(gradient).all()


def test_large_scores_do_not_overflow():
    _, q, k, v, _ = make(1, 9, 9, 1, 1, 8, "float32")
    out, lse = attention_tiled(1000 * q, 1000 * k, v, block=4)
    assert numpy.isfinite(out).all() and numpy.isfinite(lse).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_results_have_the_dtype_of_the_inputs(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    dout, q, k, v, _ = make(1, 5, 5, 2, 1, 8, dtype)
    out, lse = attention_tiled(q, k, v)
    gradients = attention_tiled_backward(dout, q, k, v, out, lse)[:3]
    assert {x.dtype for x in (out, *gradients)} == {numpy.dtype(dtype)}
    assert lse.dtype == "float32"


@pytest.mark.parametrize("per_batch", [False, True], ids=["slopes-1d", "slopes-2d"])
@pytest.mark.parametrize("options", OPTIONS[:6], ids=str)
def test_varlen_is_sequence_by_sequence(options, per_batch):
    lengths_q, lengths_k = [3, 0, 7, 1], [5, 4, 2, 0]
    cu_q, cu_k = (numpy.cumsum([0, *x], dtype="int32") for x in (lengths_q, lengths_k))
    (dout,), (q,), (k,), (v,), _ = make(1, sum(lengths_q), sum(lengths_k), 4, 2, 8)
    slopes = numpy.random.default_rng(2).random((4, 4) if per_batch else (4,))
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, alibi_slopes=slopes, **options)
    dq, dk, dv, _, _ = attention_varlen_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, alibi_slopes=slopes, **options
    )
    assert lse.shape == (4, sum(lengths_q))
    for b in range(4):
        rows, cols = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = (q[None, rows], k[None, cols], v[None, cols])
        own = dict(options, alibi_slopes=slopes[b] if per_batch else slopes)
        close((out[None, rows], lse[None, :, rows]), in_one_tile(*one, **own))
        close(
            (dq[None, rows], dk[None, cols], dv[None, cols]),
            backward_in_one_tile(dout[None, rows], *one, **own)[:3],
        )


@pytest.mark.parametrize("causal", [False, "top-left"])
def test_against_torch(causal):
    torch = pytest.importorskip("torch")
    dout, q, k, v, _ = make(2, 9, 13, 4, 2, 8)
    t_dout, *t_qkv = (torch.from_numpy(x).transpose(1, 2) for x in (dout, q, k, v))
    for x in t_qkv:
        x.requires_grad_()
    t_out = torch.nn.functional.scaled_dot_product_attention(
        *t_qkv, is_causal=bool(causal), enable_gqa=True
    )
    t_gradients = torch.autograd.grad(t_out, t_qkv, t_dout)
    out, lse = attention_tiled(q, k, v, block=4, causal=causal)
    gradients = attention_tiled_backward(dout, q, k, v, out, lse, block=4, causal=causal)[:3]
    close((out, *gradients), [x.detach().transpose(1, 2).numpy() for x in (t_out, *t_gradients)])
