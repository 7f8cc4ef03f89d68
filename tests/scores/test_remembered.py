"""Functions that are not traced again, and those that must be, as what they read has changed."""

import functools
import math

import numpy
import pytest

torch = pytest.importorskip("torch")

import cupyflash  # noqa: E402
from cupyflash.ops.attention.score_text import remembered, scores  # noqa: E402
from cupyflash.testing import make_inputs  # noqa: E402

INPUTS = make_inputs("torch", "float32", batch=1, seqlen_q=9, seqlen_k=9, heads_q=2, head_dim=8)
Q, K, V = INPUTS.q, INPUTS.k, INPUTS.v
FACTOR = 2.0  # which a test changes


@pytest.fixture
def traced(monkeypatch):
    """The functions that were traced, in an empty memory."""
    found, trace = [], scores.trace
    monkeypatch.setattr(remembered, "_texts", {})

    def noting(function, *arguments):
        found.append(function)
        return trace(function, *arguments)

    monkeypatch.setattr(scores, "trace", noting)
    return found


def check(score):
    """The result is that of the function traced for this call."""
    out = cupyflash.attention(Q, K, V, score=score)
    expected = cupyflash.attention(Q, K, V, score=cupyflash.Score(score))
    assert torch.equal(out, expected)
    return out


def alibi(slopes, factor=1.0):
    return lambda s, b, h, q, k: s - factor * slopes[h] * abs(q - k)


def helped(slopes):
    def distance(q, k):
        return torch.abs(q - k)

    return lambda s, b, h, q, k: s - slopes[h] * distance(q, k)


@pytest.mark.parametrize("make", [alibi, helped])
def test_new_arrays_are_seen_and_not_traced(traced, make):
    results = []
    for seed in range(3):
        slopes = torch.rand(2, generator=torch.Generator().manual_seed(seed))
        results.append(check(make(slopes)))
        slopes.mul_(3)
        results.append(check(make(slopes)))
    assert len(traced) == 1 + len(results)  # the others are those of `check`
    assert len({x.sum().item() for x in results}) == len(results)


def test_math_of_literals_is_known(traced):
    """T5 computes its buckets with math.log(16) beside a table."""
    for _ in range(2):
        table = torch.rand(9)
        check(lambda s, b, h, q, k, of=table: s + of[k] * math.log(16) * math.pi)
    assert len(traced) == 1 + 2


def test_masks(traced):
    for length in (3, 5):
        document = torch.arange(9) // length
        mask = lambda b, h, q, k, of=document: (of[q] == of[k]) & (k <= q)  # noqa: E731
        out = cupyflash.attention(Q, K, V, mask=mask)
        assert torch.equal(out, cupyflash.attention(Q, K, V, mask=cupyflash.Mask(mask)))
    assert len(traced) == 1 + 2


def test_gradients_go_to_the_array_of_the_call(traced):
    for _ in range(2):
        slopes = torch.rand(2, requires_grad=True)
        cupyflash.attention(Q, K, V, score=alibi(slopes)).sum().backward()
        assert slopes.grad.abs().sum() > 0
    assert len(traced) == 1


def test_what_is_traced_again(traced, monkeypatch):
    """Other numbers, dtypes, ranks, and arrays that are the same or not."""
    slopes, other = torch.rand(2), torch.rand(2)
    pair = lambda a, b: lambda s, batch, h, q, k: s - a[h] * q + b[h] * k  # noqa: E731
    score = lambda s, b, h, q, k: s * FACTOR  # noqa: E731
    calls = [
        lambda: check(alibi(slopes, 1.0)),
        lambda: check(alibi(slopes, 0.5)),
        lambda: check(alibi(slopes, 2)),
        lambda: check(alibi(slopes, numpy.float64(0.25))),
        lambda: check(alibi(slopes, numpy.float64(0.75))),
        lambda: check(alibi(slopes.double().half())),
        lambda: check(pair(slopes, slopes)),
        lambda: check(pair(slopes, other)),
        lambda: check(score),
        lambda: monkeypatch.setitem(globals(), "FACTOR", 3.0) or check(score),
    ]
    for number, call in enumerate(calls):
        call()
        assert len(traced) == 2 * (number + 1)


def by_branch(slopes):
    return lambda s, b, h, q, k: s - q if slopes[0] > 0.5 else s + k


def by_content(slopes):
    return lambda s, b, h, q, k: s - slopes[0].item() * (q + k * k)


def by_new_array(slopes):
    return lambda s, b, h, q, k: s - (2 * slopes)[h] * abs(q - k)


def by_function(slopes):
    return lambda s, b, h, q, k: s - float(slopes[0]) * (q + k * k)


def by_partial(slopes):
    return functools.partial(lambda x, s, b, h, q, k: s - x[h] * abs(q - k), slopes)


def by_scalar(slopes):
    factor = slopes[:1].reshape(()).numpy()  # an array without axes, which shares the memory
    return lambda s, b, h, q, k: s - factor * 2 * abs(q - k)


def by_element(slopes):
    table = slopes.numpy()
    return lambda s, b, h, q, k: s - table[0] * abs(q - k)


def by_largest(slopes):
    table = slopes.numpy()
    return lambda s, b, h, q, k: s - table.max() * abs(q - k)


def by_math(slopes):
    factor = slopes[0]
    return lambda s, b, h, q, k: s - math.exp(factor) * abs(q - k)


def by_helper_and_math(slopes):
    exp = math.exp

    def factor():
        return exp(slopes[0])

    return lambda s, b, h, q, k: s - factor() * abs(q - k)


def by_number_of_numpy(slopes):
    return lambda s, b, h, q, k: s - numpy.float32(slopes[0]) * abs(q - k)


BY_CONTENT = [by_branch, by_content, by_new_array, by_function, by_partial, by_scalar, by_element]
BY_CONTENT += [by_largest, by_math, by_helper_and_math, by_number_of_numpy]


@pytest.mark.parametrize("make", BY_CONTENT)
def test_what_may_depend_on_the_content_is_traced_at_each_call(traced, make):
    slopes = torch.tensor([0.25, 0.5])
    score = make(slopes)
    first = check(score)
    slopes.add_(1)
    assert not torch.equal(first, check(score))
    assert len(traced) == 4


def test_the_memory_has_an_end(traced, monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 2)
    slopes = torch.rand(2)
    for factor in (1.0, 2.0, 3.0):
        check(alibi(slopes, factor))
    assert len(remembered._texts) <= 2
