"""``score=`` and ``mask=`` of attention against float64, in both passes, with all other options."""
# ruff: noqa: E501

import functools
import importlib.util
import itertools

import numpy
import pytest

import cupyflash
from cupyflash.ops.attention.options import plain_options
from cupyflash.ops.attention.score_text.arguments import with_text
from cupyflash.ops.attention.score_text.scores import written
from cupyflash.testing import make_alibi_slopes, make_inputs, make_varlen_inputs

torch = pytest.importorskip("torch")

from cupyflash.testing.gallery import GALLERY, HEADS, LENGTH  # noqa: E402
from cupyflash.testing.scores import expected_scores, results  # noqa: E402

SLOPES = numpy.array([0.5, 0.1, 0.02, 1], "float32")
DTYPES = itertools.cycle(("float32", "float16", "bfloat16", "float32"))
CASES = [(name, dtype) for name, dtype in zip(GALLERY, DTYPES)]


def arrays_of(name):
    return GALLERY[name].arrays(torch.Generator().manual_seed(len(name)))


@pytest.mark.parametrize("name, dtype", CASES)
def test_gallery(name, dtype):
    """The traced text, its derivative by the score, and those by arrays, of two sequences."""
    found = GALLERY[name]
    layout = "bhsd" if len(name) % 2 else "bshd"
    inputs = make_inputs(
        "torch", dtype, batch=2, seqlen_q=LENGTH, seqlen_k=LENGTH, heads_q=HEADS,
        heads_kv=2, head_dim=16, layout=layout,
    )  # fmt: skip
    arrays = arrays_of(name)
    kind = {"mask" if found.is_mask else "score": found.make}
    exact = expected_scores(inputs, **kind, arrays=arrays)
    actual = results(inputs, arrays, **kind)
    if layout == "bhsd":
        actual |= {x: actual[x].transpose(1, 2) for x in ("out", "dq", "dk", "dv")}
    exact.check(**actual)


def test_a_wrong_derivative_is_found():
    inputs = make_inputs("torch", "float32", batch=1, seqlen_q=20, heads_q=HEADS, heads_kv=2)
    exact = expected_scores(inputs, lambda: lambda s, b, h, q, k: s * 1.01 + 0.01 * q)
    with pytest.raises(AssertionError, match="dk: max error"):
        exact.check(dk=results(inputs, (), lambda: lambda s, b, h, q, k: s + 0.01 * q)["dk"])


def tanh(s, b, h, q, k):
    return 0.7 * numpy.tanh(s / 0.7) + 0.0  # without the zero it would be the option


OPTIONS = [
    {"causal": True},
    {"causal": "top-left"},
    {"window": (7, 3)},
    {"sinks": numpy.array([0.5, -1, 2, 0], "float32")},
    {"dropout_p": 0.25, "dropout_seed": 5},
    {"seqused_q": numpy.array([20, 7], "int32"), "seqused_k": numpy.array([33, 5], "int32")},
    {"bias": numpy.tri(20, 33, dtype="float32")[None, None]},
    {"bias": numpy.tri(20, 33, 9, dtype=bool)[None, None]},
    {"layout": "bhsd", "causal": True},
    {"scale": 0.4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(x))
def test_beside_other_options(options):
    """A softcap as text, and a mask that hides nothing: the bits of the option in the forward."""
    heads = {"heads_q": 4, "heads_kv": 2, "layout": options.get("layout", "bshd")}
    inputs = make_inputs("numpy", "float32", batch=2, seqlen_q=20, seqlen_k=33, **heads)
    qkv = inputs.q, inputs.k, inputs.v
    seen = lambda b, h, q, k: (b < 2) & (h < 4) & (q < 20) & (k < 33)

    def both(**of_score):
        out, lse = cupyflash.attention(*qkv, return_lse=True, **of_score, **options)
        wanted = {"bias_grad": True} if options.get("bias", seen) is not seen else {}
        wanted = {} if "bias" in options and options["bias"].dtype == bool else wanted
        return (
            out,
            lse,
            *cupyflash.attention_backward(
                inputs.dout, *qkv, out, lse, **of_score, **options, **wanted
            ),
        )

    wanted, found = both(softcap=0.7), both(score=tanh, mask=seen)
    assert all(numpy.array_equal(x, y) for x, y in zip(wanted[:2], found))
    for x, y in zip(wanted[2:], found[2:], strict=True):  # products in another order
        assert (x is y is None) or abs(x - y).max() <= 2**-20 * abs(x).max()


CAP = 7.5
SOFTCAPS = [
    ("30.0 * tanh(score / 30.0)", 30.0),
    ("tanh(score / 30) * 30.0", 30.0),
    (lambda s, b, h, q, k: CAP * numpy.tanh(s / CAP), 7.5),
    (functools.partial(lambda s, b, h, q, k, cap: cap * numpy.tanh(s / cap), cap=3), 3.0),
    ("30.0 * tanh(score / 20.0)", None),
    ("30.0 * tanh(30.0 / score)", None),
    ("30.0 * tanh(query / 30.0)", None),
    ("30.0 * tanh(score / 30.0) + 1", None),
    ("-30.0 * tanh(score / -30.0)", None),  # softcap must be positive
    ("5000.0 * tanh(score / 5000.0)", None),  # the option has other kernels from 4096 on
    (lambda s, b, h, q, k: numpy.float32(CAP) * numpy.tanh(s / CAP), 7.5),
]


@pytest.mark.parametrize(("source", "cap"), SOFTCAPS)
def test_a_softcap_is_the_option(source, cap):
    score, seen = cupyflash.Score(source), cupyflash.Mask("key <= query")
    assert score.softcap == cap
    plain, arrays = plain_options("attention"), ("q", "k", "v")
    capped = plain_options("attention", softcap=cap or 0.0)
    for given in (score, source) if callable(source) else (score,):
        options, found = with_text("attention", plain, arrays, 3, given, None)
        assert (options == capped and found == arrays) == (cap is not None)
        options, found = with_text("attention", plain, arrays, 3, given, seen)
        assert options[:-1] == capped and options[-1].mask == "key <= query"
        assert (options[-1].score == "") == (cap is not None) and len(found) >= 12
    text = with_text("attention", plain_options("attention", softcap=2.0), arrays, 3, score, None)
    assert text[0][-1].score == score.text  # which is refused later
    slopes = (*arrays, None, None, "slopes", None, None, None, None, None)
    assert with_text("attention", plain, slopes, 3, score, None)[0][-1].score == score.text


def test_a_number_that_changes_is_no_softcap():
    """An array without axes is read anew at each call."""
    cap = numpy.array(30.0, "float32")
    assert cupyflash.Score("cap * tanh(score / cap)", cap=cap).softcap is None


def test_mask_beside_softcap_and_slopes():
    inputs = make_inputs("numpy", "float32", seqlen_q=20, seqlen_k=20, heads_q=4, heads_kv=2)
    slopes = make_alibi_slopes(4, "numpy")
    options = {"softcap": 2.0, "alibi_slopes": slopes}
    mask = lambda b, h, q, k: k <= q
    found = cupyflash.attention(inputs.q, inputs.k, inputs.v, mask=mask, **options)
    assert numpy.array_equal(
        found, cupyflash.attention(inputs.q, inputs.k, inputs.v, causal=True, **options)
    )


def test_tiles_of_a_mask():
    """The CPU has no use for them; they reach what launches the kernels behind the captures."""
    inputs = make_inputs("torch", "float32", seqlen_q=20, seqlen_k=20, heads_q=4, heads_kv=2)
    document = torch.arange(20) // 7
    mask = cupyflash.Mask(lambda b, h, q, k: document[q] == document[k])
    score = cupyflash.Score(lambda s, b, h, q, k: s - 0.1 * (q - k))
    tiles = mask.tiles()
    assert tiles.found is not None and mask.found is None and mask.tiles().found is not tiles.found
    x = inputs.q.detach().requires_grad_()
    for options in ({}, {"score": score}):
        found = [
            cupyflash.attention(x, inputs.k, inputs.v, mask=m, **options) for m in (mask, tiles)
        ]
        gradients = [torch.autograd.grad(out, x, inputs.dout)[0] for out in found]
        assert torch.equal(*found) and torch.equal(*gradients)
    _, values = written("attention", score, tiles)
    assert values[0] is document and values[-1] is tiles.found


def test_packed_sequences():
    """Batch is the number of the sequence, places count from its beginning."""
    lengths_q, lengths_k = [9, 0, 11, 20], [12, 3, 12, 20]
    inputs = make_varlen_inputs("torch", "float32", lengths_q, lengths_k, heads_q=4, heads_kv=2)
    table = torch.randn(4, 41, requires_grad=True)
    factor = torch.tensor([1.0, 2.0, 0.5, 3.0], requires_grad=True)
    score = lambda s, b, h, q, k: s * factor[b] + table[h, k - q + 20]
    mask = lambda b, h, q, k: (k <= q + 2) | (b == 3)
    ends = [numpy.cumsum([0, *x]) for x in (lengths_q, lengths_k)]

    def packed(q, k, v):
        places = inputs.cu_seqlens_q, inputs.cu_seqlens_k, 20, 20
        return cupyflash.flash_attn_varlen_func(q, k, v, *places, score=score, mask=mask)

    def apart(q, k, v):
        parts = []
        for b in (0, 2, 3):
            rows, cols = (slice(*x[b : b + 2]) for x in ends)
            of_b = lambda s, _, h, q, k, b=b: score(s, b, h, q, k)
            mask_b = lambda _, h, q, k, b=b: (k <= q + 2) | (b == 3)
            x = (q[None, rows], k[None, cols], v[None, cols])
            parts.append(cupyflash.attention(*x, score=of_b, mask=mask_b)[0])
        return torch.cat(parts)

    found = []
    for function in (packed, apart):
        qkv = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = function(*qkv)
        found.append((out, *torch.autograd.grad(out, (*qkv, table, factor), inputs.dout)))
    for x, y in zip(*found):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_rows_that_see_nothing():
    """0, and an LSE of -inf; nothing flows back, whatever the score is there."""
    x = torch.randn(1, 8, 2, 16, requires_grad=True)
    score = lambda s, b, h, q, k: torch.where(q == 3, -float("inf"), torch.log(s.abs()))
    out, lse = cupyflash.attention(
        x, x, x, score=score, mask=lambda b, h, q, k: (q != 5) & (k != 7), return_lse=True
    )
    (gradient,) = torch.autograd.grad(out.sum(), x)
    hidden = torch.tensor([False, False, False, True, False, True, False, False])
    assert (out[:, hidden] == 0).all() and torch.isinf(lse[..., hidden]).all()
    assert torch.isfinite(out).all() and torch.isfinite(gradient).all()
    assert torch.isfinite(lse[..., ~hidden]).all()


def test_gradients_of_arrays_without_autograd():
    """`attention_backward` of NumPy, by differences of the forward, of the LSE too."""
    inputs = make_inputs(
        "numpy", "float32", batch=2, seqlen_q=12, seqlen_k=15, heads_q=4, heads_kv=2
    )
    qkv, dlse = (inputs.q, inputs.k, inputs.v), numpy.full((2, 4, 12), 0.3, "float32")
    table = numpy.linspace(-1, 1, 4 * 9, dtype="float32").reshape(4, 9)
    masked = {"mask": lambda b, h, q, k: k <= q + 3}

    def score(slopes):
        return lambda s, b, h, q, k: s - slopes[h] * abs(q - k) + table[h, abs(q - k) // 2]

    options = {"score": score(SLOPES)} | masked
    out, lse = cupyflash.attention(*qkv, return_lse=True, **options)
    found = cupyflash.attention_backward(
        inputs.dout, *qkv, out, lse, dlse=dlse, score_grad=True, **options
    )
    assert found._fields[-1] == "dcaptures" and found.dbias is found.dsinks is None
    assert found.dcaptures.keys() == {"slopes", "table"} and found.dcaptures["table"].any()
    for i, step in enumerate(numpy.eye(4, dtype="float32") * 2**-6):
        sums = []
        for x in (SLOPES + step, SLOPES - step):
            out, lse = cupyflash.attention(*qkv, return_lse=True, score=score(x), **masked)
            sums.append(
                (out * inputs.dout).sum(dtype="float64") + (lse * dlse).sum(dtype="float64")
            )
        assert found.dcaptures["slopes"][i] == pytest.approx((sums[0] - sums[1]) * 2**5, rel=2e-3)
    dq, dk, dv = cupyflash.attention_backward(inputs.dout, *qkv, out, lse, **options)
    assert dq.shape == inputs.q.shape and dk.shape == inputs.k.shape == dv.shape


def of_slopes(slopes, s, b, h, q, k):
    return s * 0.5 - slopes[h] * abs(q - k)


def test_libraries():
    """NumPy, torch and JAX, with arrays of their own, give the same numbers."""
    inputs = make_inputs("numpy", "float32", seqlen_q=12, seqlen_k=12, heads_q=4, heads_kv=2)
    found = []
    libraries = {"numpy": numpy.asarray, "torch": torch.from_numpy}
    if importlib.util.find_spec("jax"):
        import jax

        host = jax.devices("cpu")[0]
        libraries["jax"] = functools.partial(jax.numpy.asarray, device=host)
    for make in libraries.values():
        slopes, qkv = make(SLOPES), [make(x) for x in (inputs.q, inputs.k, inputs.v)]
        out = cupyflash.attention(*qkv, score=functools.partial(of_slopes, slopes))
        assert type(out) is type(qkv[0])
        found.append(numpy.asarray(out))
    assert all(numpy.array_equal(x, found[0]) for x in found)


def test_autocast_and_what_the_text_reads():
    """q, k and v are cast, as without a score; the arrays of the score stay as they are."""
    x = torch.randn(1, 9, 4, 16)
    slopes = torch.tensor(SLOPES, requires_grad=True)
    score = cupyflash.Score(lambda s, b, h, q, k: s - slopes[h] * (q - k).abs())
    with torch.autocast("cpu", torch.bfloat16):
        out = cupyflash.attention(x, x, x, score=score)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert slopes.grad.dtype == torch.float32 and slopes.grad.any()


def refused(kind, fact, *arrays, **options):
    with pytest.raises(kind) as error:
        cupyflash.attention(*arrays, **options)
    assert fact in str(error.value), str(error.value)


def test_wrong_calls():
    x = numpy.ones((1, 8, 4, 16), "float32")
    slopes = torch.tensor(SLOPES)
    score = lambda s, b, h, q, k: s * 2
    for options, kind, fact in (
        ({"score": score, "softcap": 3.0}, ValueError, "attention: softcap must be left out beside"),
        ({"score": score, "alibi_slopes": SLOPES}, ValueError, "alibi_slopes must be left out beside"),
        ({"score": "score * 2"}, TypeError, "got 'score * 2' (write cupyflash.Score(score))"),
        ({"score": x}, TypeError, "score must be a function or a cupyflash.Score, got an array"),
        ({"mask": x > 0}, TypeError, "(an array of scores to add, or a Boolean one, is bias=)"),
        ({"mask": cupyflash.Score(score)}, TypeError, "mask must be a function or a cupyflash.Mask"),
        ({"score": lambda s, b, h, q, k: s * SLOPES[q]}, ValueError, "axis 0 of SLOPES must have at least 8 elements, got (4,), where"),
        ({"score": lambda s, b, h, q, k: s * SLOPES[q + 1]}, IndexError, "SLOPES is read outside of its axis 0 of 4, got index 4"),
        ({"score": lambda s, b, h, q, k: s * slopes[h]}, TypeError, "attention: slopes must be a numpy.ndarray like q"),
    ):  # fmt: skip
        refused(kind, fact, x, x, x, **options)
    y = torch.ones(1, 8, 4, 16)
    numbers = torch.ones(8, device="meta")
    refused(
        ValueError, "numbers, which the score", y, y, y, score=lambda s, b, h, q, k: s * numbers[q]
    )
    kwargs = {"score_grad": True, "score": score}
    with pytest.raises(ValueError, match="score_grad needs a score that reads floating-point"):
        cupyflash.attention_backward(x, x, x, x, x, x[..., 0].swapaxes(1, 2).copy(), **kwargs)
