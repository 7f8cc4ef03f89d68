"""The gallery of scores and masks on each backend of a GPU, both passes, against float64."""

import dataclasses
import functools

import pytest
from matrix import each

import cupyflash

torch = pytest.importorskip("torch")

from cupyflash.testing.gallery import GALLERY, HEADS, LENGTH  # noqa: E402
from cupyflash.testing.scores import expected_scores, results  # noqa: E402

HEAD_DIMS = (64, 128, 32, 96, 256, 40)


@pytest.mark.parametrize("name", GALLERY)
@each(library="torch", device="cuda")
def test_gallery(target, name):
    case, number = GALLERY[name], list(GALLERY).index(name)
    for i, dtype in enumerate(target.dtypes):
        head_dim = HEAD_DIMS[(number + i) % len(HEAD_DIMS)]
        inputs = target.inputs(
            dtype, batch=2, seqlen_q=LENGTH, seqlen_k=LENGTH, heads_q=HEADS, heads_kv=2,
            head_dim=head_dim,
        )  # fmt: skip
        arrays = case.arrays(torch.Generator().manual_seed(number))
        kind = {"mask" if case.is_mask else "score": case.make}
        found = results(inputs, tuple(x.cuda() for x in arrays), **kind)
        of_host = {x: getattr(inputs, x).cpu() for x in ("q", "k", "v", "dout")}
        expected = expected_scores(dataclasses.replace(inputs, **of_host), **kind, arrays=arrays)
        expected.check(**found)


@pytest.mark.parametrize("name", ["alibi", "distance table", "gate", "temperature", "swin"])
@each(library="torch", device="cuda")
def test_gradients_in_exact_sums(target, name):
    """With deterministic=True equal calls give equal bits, of every gradient."""
    case = GALLERY[name]
    arrays = case.arrays(torch.Generator().manual_seed(0))
    for dtype in target.dtypes:
        inputs = target.inputs(
            dtype, batch=2, seqlen_q=LENGTH, seqlen_k=LENGTH, heads_q=HEADS, heads_kv=2, head_dim=64
        )
        moved = tuple(x.cuda() for x in arrays)
        calls = [results(inputs, moved, score=case.make, deterministic=True) for _ in range(5)]
        of_host = {x: getattr(inputs, x).cpu() for x in ("q", "k", "v", "dout")}
        host = dataclasses.replace(inputs, **of_host)
        expected_scores(host, score=case.make, arrays=arrays).check(**calls[0])
        for again in calls[1:]:
            assert all(torch.equal(x, again[result]) for result, x in calls[0].items())


def _swings(x, reach, least):
    """A number of the call bounds one side, and another number the other."""
    return lambda s, b, h, q, k: s + x[h, torch.clamp(q - k, -reach, least) + reach]


def _never(x):
    """No distance reaches these bounds."""
    least, most = -(2**31) + 1, 2**31 - 1
    return lambda s, b, h, q, k: s + 0.01 * torch.clamp(q - k, least, most) + x[h, 0]


SLOPES = torch.tensor([0.3, -0.02, 0.004, 2.0])
TABLE = torch.randn(HEADS, 600, generator=torch.Generator().manual_seed(3))
# Far from the diagonal these are lines of the distance, or constants.
LINES = {
    "alibi": (lambda x: lambda s, b, h, q, k: s - x[h] * (q - k).abs() + h, SLOPES),
    "bounded by numbers": (lambda x: _swings(x, 150, 80), TABLE),
    "never bounded": (_never, torch.zeros(HEADS, 1)),
    "one side": (lambda x: lambda s, b, h, q, k: s + x[h] * torch.clamp(q - k, min=-40), SLOPES),
    "quotients of what learns": (
        lambda x: lambda s, b, h, q, k: s - x[h] / 3 * (q - k).abs() / (1 + x[h].abs()),
        SLOPES,
    ),
}


def _check_shapes(target, make, arrays, head_dim, batch):
    """Both passes of a score with a full, a causal and a windowed shape, one for each dtype."""
    shapes = ((700, 700, {}), (330, 811, {"causal": True}), (60, 1900, {"window": (1500, None)}))
    for number, dtype in enumerate(target.dtypes):
        queries, keys, options = shapes[number % len(shapes)]
        inputs = target.inputs(
            dtype, batch=batch, seqlen_q=queries, seqlen_k=keys, heads_q=HEADS, heads_kv=2,
            head_dim=head_dim,
        )  # fmt: skip
        found = results(inputs, tuple(x.cuda() for x in arrays), score=make, **options)
        of_host = {x: getattr(inputs, x).cpu() for x in ("q", "k", "v", "dout")}
        seen = _seen(queries, keys, **options)
        kinds = {"score": make, "mask": functools.partial(_given, seen)}
        host = dataclasses.replace(inputs, **of_host)
        expected_scores(host, **kinds, arrays=arrays).check(**found)


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@each(library="torch", device="cuda")
def test_lines_far_from_the_diagonal(target, name, head_dim):
    make, array = LINES[name]
    _check_shapes(target, make, (array,), head_dim, batch=1)


RANDOM = torch.randn(2, 2, 1900, generator=torch.Generator().manual_seed(5))
FORGOTTEN = torch.nn.functional.logsigmoid(RANDOM[0]).cumsum(-1)
# Some keys are hidden, and a tile of them; some factors are no number above 0.
HIDDEN = torch.where(RANDOM[1] < -1.3, -torch.inf, RANDOM[1])
HIDDEN[:, 128:256] = -torch.inf
FACTORS = torch.where(torch.arange(1900) // 16 % 3 == 0, RANDOM[0], RANDOM[0].abs())
FACTORS[:, 7], FACTORS[:, 77] = 0.0, 1e-30
TERMS = {
    "gate": (
        lambda x, y: lambda s, b, h, q, k: 2.0 * s / 3.0 * torch.sigmoid(x[b, q]) + y[b, k] + h,
        (RANDOM[0], RANDOM[1]),
    ),
    "forget": (lambda x: lambda s, b, h, q, k: s + (x[b, q] - x[b, k]), (FORGOTTEN,)),
    "out of range": (lambda x, y: lambda s, b, h, q, k: y[b, k] + s * x[b, q], (FACTORS, HIDDEN)),
}


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@each(library="torch", device="cuda")
def test_terms_of_keys(target, name, head_dim):
    make, arrays = TERMS[name]
    _check_shapes(target, make, arrays, head_dim, batch=2)


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("large", [1e6, 1e18, 1e19, 1e30])
@each(library="torch", device="cuda")
def test_the_largest_term(target, large, head_dim):
    """A key whose term outweighs all others is the only one that counts, and a NaN stays one."""
    term = torch.zeros(300, device="cuda")
    term[::7] = -large
    term[201] = large
    spoilt = term.clone()
    spoilt[250] = torch.nan
    for dtype in target.dtypes:
        inputs = target.inputs(
            dtype, batch=1, seqlen_q=300, seqlen_k=300, heads_q=2, head_dim=head_dim
        )
        q, k, v = inputs.q, inputs.k, inputs.v
        out = cupyflash.attention(q, k, v, score=lambda s, b, h, q, k: s + term[k])
        # A weight near 1 is rounded to 16 bits, and the sum of weights is not.
        torch.testing.assert_close(out, v[:, 201:202].expand_as(out))
        out = cupyflash.attention(q, k, v, score=lambda s, b, h, q, k: s + spoilt[k])
        assert out.isnan().all()


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@each(library="torch", device="cuda")
def test_slopes_that_no_half_float_holds(target, head_dim):
    """Each query then sees its own key alone, as a text and as the option."""
    slopes = torch.tensor([1e4, 3e5, 1e8, 1e20], device="cuda")[:HEADS]
    for dtype in {"float16", "bfloat16"}.intersection(target.dtypes):
        inputs = target.inputs(
            dtype, batch=1, seqlen_q=500, seqlen_k=500, heads_q=HEADS, head_dim=head_dim
        )
        q, k, v = inputs.q, inputs.k, inputs.v
        text = cupyflash.attention(q, k, v, score=lambda s, b, h, q, k: s - slopes[h] * abs(q - k))
        assert torch.equal(text, v)
        assert torch.equal(cupyflash.attention(q, k, v, alibi_slopes=slopes), v)


def _given(seen, *_):
    return seen


def _seen(queries, keys, causal=False, window=(None, None)):
    """The mask of these options, whose diagonal ends in the last corner."""
    left = keys if window[0] is None else window[0]
    right = 0 if causal else queries + keys

    def seen(b, h, q, k):
        gap = q + keys - queries - k
        return (gap <= left) & (gap >= -right)

    return seen


@each(library="torch", device="cuda")
def test_long_masks(target):
    """Tiles that are empty, full and mixed; documents, a window and a mask by head."""
    length = 700
    document = (torch.arange(length) // 190).int()
    masks = {
        "documents": lambda of: lambda b, h, q, k: of[q] == of[k],
        "window": lambda of: lambda b, h, q, k: (q >= k) & (q - k < 100),
        "by head": lambda of: lambda b, h, q, k: (q >= k) | (h % 2 == 0),
        "nothing": lambda of: lambda b, h, q, k: q < 0,
    }
    for i, mask in enumerate(masks.values()):
        dtype = target.dtypes[i % len(target.dtypes)]
        inputs = target.inputs(
            dtype, batch=1, seqlen_q=length, seqlen_k=length, heads_q=4, heads_kv=2,
            head_dim=HEAD_DIMS[i],
        )  # fmt: skip
        found = results(inputs, (document.cuda(),), mask=mask)
        of_host = {x: getattr(inputs, x).cpu() for x in ("q", "k", "v", "dout")}
        host = dataclasses.replace(inputs, **of_host)
        expected_scores(host, mask=mask, arrays=(document,)).check(**found)
