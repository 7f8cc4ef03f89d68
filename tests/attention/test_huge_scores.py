"""Huge scores and very many sequences: where 32 bits of either kind could overflow."""

import numpy
import pytest
from matrix import each_library
from targets import FORCED, GPU_TARGETS, TARGETS, backends, large_tiles

import cupyflash
from cupyflash import environment
from cupyflash.testing import to_float64
from cupyflash.testing.tolerance import assert_close_to_float64, to_numpy64

GPU = pytest.mark.skipif(not backends(), reason="needs a GPU")


def filled(target, shape, value, dtype):
    return target.array(numpy.full(shape, value), dtype)


def each_target(test):
    return pytest.mark.parametrize("target", TARGETS, ids=lambda x: x.name, indirect=True)(test)


@each_target
@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype, value", [("bfloat16", 133120.0), ("float16", 2**13)])
def test_equal_values(target, dtype, value, head_dim, rows):
    """PyTorch's own case: whatever the scores, the mean of equal values is that value."""
    if dtype not in target.dtypes:
        pytest.skip(f"{target.name} has no {dtype}")
    x = filled(target, (1, rows, 2, head_dim), value, dtype)
    out = to_float64(cupyflash.attention(x, x, x))
    assert (out == value).all(), f"{out.min()} to {out.max()}"


@each_library()
@pytest.mark.parametrize("softcap", [50.0, 4096.0, 1e6, 1e30])
def test_softcap(target, softcap):
    """Weights are right to the last place of float16, however large the softcap.

    The bound is from theory: a yardstick in float16 would be infinite.
    """
    rng = numpy.random.default_rng(8)
    values = rng.standard_normal((3, 2, 300, 2, 64))
    q, k, v = (target.array(4 * x, "float16") for x in values)
    exact = [to_float64(x)[:, :, 0] for x in (q, k, v)]
    scores = softcap * numpy.tanh(exact[0] @ exact[1].transpose(0, 2, 1) / 8 / softcap)
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights @ exact[2] / weights.sum(-1, keepdims=True)
    if FORCED not in (None, "simt") and softcap > 4096:
        with pytest.raises(NotImplementedError, match="a softcap above 4096$"):
            cupyflash.attention(q, k, v, softcap=softcap)
        return
    found = to_float64(cupyflash.attention(q, k, v, softcap=softcap))[:, :, 0]
    assert abs(found - wanted).max() < 2.0**-11 * abs(exact[2]).max() * 2


@each_library()
@pytest.mark.parametrize("factor", [1e-7, 2e-5, 1e-3, 1.0, 1e5])
@pytest.mark.parametrize("spread", [0.03, 0.08, 0.2, 0.5])
def test_softcap_of_small_scores(target, factor, spread):
    """tanh(factor * q k^T) on both sides of 0.22 and 0.4, up to which Hopper has polynomials."""
    values = numpy.random.default_rng(9).standard_normal((3, 700, 64))
    values[:2] *= (spread / factor / 8) ** 0.5
    check_softcap(target, values, factor)


@each_library()
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("greater", [3, 12, 50])
def test_softcap_of_sudden_scores(target, head_dim, greater):
    """Hopper does not look at scores before their tanh behind two tiles of small ones."""
    values = numpy.random.default_rng(9).standard_normal((3, 5000, head_dim))
    values[:2] *= (0.04 / head_dim**0.5) ** 0.5
    values[1, [3, 700, 701, 1900]] *= greater
    with large_tiles():  # otherwise blocks share the keys, and none has many tiles
        check_softcap(target, values, 1.0)


def check_softcap(target, values, factor):
    """Of q, k and v without batch and heads, with tanh(factor * q k^T)."""
    softcap = 50.0
    q, k, v = (target.array(x[None, :, None], "float16") for x in values)
    q = q[:, :700]
    exact = [to_float64(x)[0, :, 0] for x in (q, k, v)]
    scores = softcap * numpy.tanh(factor * exact[0] @ exact[1].T)
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights @ exact[2] / weights.sum(-1, keepdims=True)
    out, lse = cupyflash.attention(
        q, k, v, scale=softcap * factor, softcap=softcap, return_lse=True
    )
    assert abs(to_float64(out)[0, :, 0] - wanted).max() < 2.0**-11 * abs(exact[2]).max() * 2
    wanted = numpy.log(weights.sum(-1)) + scores.max(-1)
    assert abs(to_float64(lse)[0, 0] - wanted).max() < 1e-6 * softcap


@each_target
@pytest.mark.parametrize("power", [12, 20, 24, 26, 30, 34, 40])
def test_one_key_stands_out(target, power):
    """Scores up to +-2^power: the largest one takes all, also in a later tile, also if negative."""
    dtype = "bfloat16" if "bfloat16" in target.dtypes else "float16"
    if dtype == "float16" and power > 30:
        pytest.skip("float16 ends before")
    rng = numpy.random.default_rng(power)
    keys, head_dim = 700, 64
    q = numpy.zeros((1, 5, 1, head_dim))
    k = numpy.zeros((1, keys, 1, head_dim))
    q[..., 0] = 2.0 ** (power / 2 - 3)
    # Different in 8 digits, what 16 bits keep: at least 2^(power - 8) apart.
    k[0, :, 0, 0] = -(2.0 ** (power / 2)) * (1 + rng.permutation(keys) % 128 / 128)
    best = {row: int(rng.integers(keys)) for row in range(2)}
    k[0, list(best.values())[0], 0, 0] = -(2.0 ** (power / 2 - 1))
    q[0, 3:] *= -1
    v = rng.standard_normal((1, keys, 1, head_dim))
    q, k, v = (target.array(x, dtype) for x in (q, k, v))
    exact = [to_float64(x)[0, :, 0] for x in (q, k, v)]
    scores = exact[0] @ exact[1].T
    weights = numpy.exp(scores - scores.max(1, keepdims=True))
    wanted = weights @ exact[2] / weights.sum(1, keepdims=True)
    out, lse = cupyflash.attention(q, k, v, scale=1.0, return_lse=True)
    found = to_float64(out)[0, :, 0]
    assert numpy.isfinite(found).all()
    # Bounds from theory, as above: one last place of bfloat16, and of the scores in float32.
    assert abs(found - wanted).max() <= 2.0**-7 * abs(exact[2]).max()
    peak = scores.max(1)
    assert (abs(to_float64(lse)[0, 0] - peak) <= 2.0**-22 * abs(peak) + 8).all()


@each_target
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scale", [None, 3.0, 2.0**100])
def test_keys_of_minus_infinity(target, scale, head_dim):
    """Whole tiles of scores of -inf, seen first or last: their keys have the weight 0."""
    rng = numpy.random.default_rng(head_dim)
    q, k, v = rng.standard_normal((3, 1, 700, 1, head_dim))
    q[..., 0] = abs(q[..., 0]) + 0.1
    k[:, 300:, :, 0] = -numpy.inf  # the kernels walk from the last key tile to the first
    k[:, :5, :, 0] = -numpy.inf
    q, k, v = (target.array(x, "float16") for x in (q, k, v))
    found = to_float64(cupyflash.attention(q, k, v, scale=scale))
    kept = slice(5, 300)
    wanted = to_float64(cupyflash.attention(q, k[:, kept], v[:, kept], scale=scale))
    # The same weights, in tiles of other keys: a few last places of float16.
    assert abs(found - wanted).max() <= 2.0**-9 * abs(wanted).max()


@each_target
def test_no_gradient_rather_than_a_wrong_one(target):
    """Where the LSE in float32 keeps no digit of a weight, gradients are NaN; in no other row."""
    q, k, v, dout = numpy.random.default_rng(1).standard_normal((4, 1, 8, 1, 64))
    q[0, 3] = k[0, 0] = 30000
    q, k, v, dout = (target.array(x, "float16") for x in (q, k, v, dout))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse)
    out, lse, dq, dk, dv = (to_float64(x) for x in (out, lse, *gradients))
    assert numpy.isfinite(out).all() and lse[0, 0, 3] > 2**24
    assert numpy.isnan(dq[0, 3]).all() and numpy.isnan(dv).all() and numpy.isnan(dk).all()
    assert numpy.isfinite(dq[0, :3]).all() and numpy.isfinite(dq[0, 4:]).all()


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("target", GPU_TARGETS, ids=lambda x: x.name, indirect=True)
def test_float32_keeps_its_digits(target, head_dims):
    """Scores of 60 and more, where a weight shows how both passes round a score.

    The yardstick adds up scores in blocks of 32 columns. The kernels are those that a user gets:
    the two passes may differ.
    """
    if target.backend not in ("fp16x3", "simt"):
        pytest.skip(f"{target.name} has no float32")
    shape = {"batch": 1, "seqlen_q": 300, "heads_q": 2, "head_dim": head_dims[0]}
    inputs = target.inputs("float32", **shape, head_dim_v=head_dims[1])
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    with environment.override(backend="simt" if target.backend == "simt" else FORCED):
        out, lse = cupyflash.attention(q, k, v, scale=1.0, return_lse=True)
        found = cupyflash.attention_backward(dout, q, k, v, out, lse, scale=1.0)
    arrays = [to_numpy64(x)[0].swapaxes(0, 1) for x in (dout, q, k, v)]
    exact = gradients(*arrays)
    yardstick = gradients(*(x.astype("float32") for x in arrays))
    for name, result, *right in zip(("dq", "dk", "dv"), found, exact, yardstick, strict=True):
        result = to_numpy64(result)[0].swapaxes(0, 1)
        assert_close_to_float64(result, *right, "float32", name)


def gradients(dout, q, k, v):
    """(dq, dk, dv) at scale 1, heads first, in the dtype of the arrays."""
    transposed = lambda x: x.swapaxes(1, 2)
    parts = range(0, q.shape[2], 32)
    scores = sum(q[..., i : i + 32] @ transposed(k[..., i : i + 32]) for i in parts)
    peak = scores.max(2, keepdims=True)
    log2_e = scores.dtype.type(numpy.log2(numpy.e))  # the kernels have powers of two
    lse = log2_e * (peak + numpy.log(numpy.exp(scores - peak).sum(2, keepdims=True)))
    weights = numpy.exp2(scores * log2_e - lse)
    delta = (dout * (weights @ v)).sum(2, keepdims=True)
    dscores = weights * (dout @ transposed(v) - delta)
    return dscores @ k, transposed(dscores) @ q, transposed(weights) @ dout


@GPU
@pytest.mark.parametrize("keys", [64, 8192], ids=["plain", "split"])
@pytest.mark.no_backend
@pytest.mark.parametrize("backend", backends())
def test_lse_of_a_nan_row(backend, keys):
    """NaN in a query reaches its out and its LSE, and nothing else, also where keys are split."""
    import cupy

    q = cupy.random.standard_normal((1, 4, 2, 64), "float32").astype("float16")
    k = cupy.random.standard_normal((1, keys, 2, 64), "float32").astype("float16")
    q[0, 2, 1] = cupy.nan
    with environment.override(backend=backend):
        out, lse = cupyflash.attention(q, k, k, return_lse=True)
    nan = cupy.zeros((1, 4, 2), bool)
    nan[0, 2, 1] = True
    assert (cupy.isnan(lse).transpose(0, 2, 1) == nan).all()
    assert (cupy.isnan(out).all(-1) == nan).all() and (cupy.isnan(out).any(-1) == nan).all()


@GPU
@pytest.mark.parametrize(
    "count, length, heads",
    [(2**18, 8, 1), (2**15, 1, 8), (2**15 + 1, 1, 8), (33000, 1, 8), (2**16, 2, 4)],
    ids=str,
)
@pytest.mark.no_backend
@pytest.mark.parametrize("backend", backends())
def test_many_packed_sequences(backend, count, length, heads):
    """As the same sequences in a batch of few at a time, both passes."""
    import cupy

    shape = (count * length, heads, 64)
    q, k, v, dout = (
        cupy.random.standard_normal(shape, "float32").astype("float16") for _ in "qkvd"
    )
    cu = cupy.arange(count + 1, dtype="int32") * length
    packed = (cu, cu, length, length)
    options = {"causal": True}
    with environment.override(backend=backend):
        found = packed_both(q, k, v, dout, packed, options)
        some = slice(count * length // 2, count * length // 2 + 64 * length)
        wanted = batch_both(*(x[some] for x in (q, k, v, dout)), length, options)
        last = slice(-64 * length, None)
        wanted_last = batch_both(*(x[last] for x in (q, k, v, dout)), length, options)
    for part, right in ((some, wanted), (last, wanted_last)):
        for name, x, y in zip(("out", "dq", "dk", "dv"), found, right, strict=True):
            difference = abs(x[part].astype("float32") - y.astype("float32")).max()
            assert float(difference) <= 2.0**-8 * float(abs(y).max()), name


def packed_both(q, k, v, dout, packed, options):
    import torch

    tensors = [torch.from_dlpack(x).requires_grad_() for x in (q, k, v)]
    cu_q, cu_k, longest_q, longest_k = packed
    out = cupyflash.flash_attn_varlen_func(
        *tensors, torch.from_dlpack(cu_q), torch.from_dlpack(cu_k), longest_q, longest_k, **options
    )
    return as_cupy(out, *torch.autograd.grad(out, tensors, torch.from_dlpack(dout)))


def batch_both(q, k, v, dout, length, options):
    q, k, v, dout = (x.reshape(-1, length, *x.shape[1:]) for x in (q, k, v, dout))
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    return [x.reshape(-1, *x.shape[2:]) for x in (out, *gradients)]


def as_cupy(*tensors):
    import cupy

    return [cupy.from_dlpack(x.detach()) for x in tensors]


@GPU
@pytest.mark.no_backend
@pytest.mark.parametrize("backend", backends())
def test_many_padded_sequences(backend):
    """2^16 sequences with lengths of their own."""
    import cupy

    batch = 2**16
    q, k, v, dout = (
        cupy.random.standard_normal((batch, 4, 4, 64), "float32").astype("float16") for _ in "qkvd"
    )
    used = cupy.random.randint(0, 5, batch).astype("int32")
    with environment.override(backend=backend):
        out, lse = cupyflash.attention(q, k, v, causal=True, seqused_k=used, return_lse=True)
        gradients = cupyflash.attention_backward(
            dout, q, k, v, out, lse, causal=True, seqused_k=used
        )
        part = slice(batch - 300, batch)
        few = [x[part] for x in (q, k, v, dout)]
        right, right_lse = cupyflash.attention(
            *few[:3], causal=True, seqused_k=used[part], return_lse=True
        )
        right_gradients = cupyflash.attention_backward(
            few[3], *few[:3], right, right_lse, causal=True, seqused_k=used[part]
        )
    for x, y in zip((out, lse, *gradients), (right, right_lse, *right_gradients), strict=True):
        # Both are results of these kernels: a row at the wrong address differs by far more.
        assert cupy.allclose(x[part].astype("float32"), y.astype("float32"), atol=2.0**-8)
