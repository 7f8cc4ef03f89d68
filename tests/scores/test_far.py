"""Where a number of the distance is said to be a line, it is one."""

import numpy
import pytest

from cupyflash.ops.attention.score_text import Capture, Text
from cupyflash.ops.attention.score_text.evaluate import Evaluation
from cupyflash.ops.attention.score_text.far import MOST, far_from_diagonal

pytestmark = pytest.mark.no_backend
REACH = 2 * MOST
VALUES = {
    "a": numpy.linspace(0.1, 0.9, 2 * REACH + 1),
    "n": -20,
    "m": 35,
    "x": 0.75,
}
CAPTURES = (
    Capture("a", "float32", 1),
    *(Capture(name, "int", 0) for name in "nm"),
    Capture("x", "float", 0),
)


def value_of(tree, distances):
    places = {
        "batch": numpy.zeros(1, int),
        "head": numpy.ones(1, int),
        "query": numpy.maximum(distances, 0),
        "key": numpy.maximum(-distances, 0),
    }
    found = Evaluation(tree, {"score": numpy.zeros(len(distances))} | places, VALUES).value
    return numpy.broadcast_to(found, distances.shape)


def least(bounds, first):
    """The least distance within bounds, as the kernels find it."""
    sums = [
        (sum(VALUES[name] * factor for name, factor in x.total.numbers) + x.total.constant, x)
        for x in bounds
    ]
    return max([first, *(int(total / x.divisor) + 1 for total, x in sums)])


@pytest.mark.parametrize(
    ("number", "behind", "ahead"),
    [
        ("a(head) * abs(query - key)", 1, 1),
        ("a(clamp(key - query, -127, 127) + 127)", 128, 128),
        ("a(min(abs(query - key), 31)) / x", 32, 32),
        ("x * (query - key) - 3.0", 0, 1),
        # Numbers of the call have a part in where it becomes a constant, and may cross.
        ("a(clamp(key - query, n, m) + 20)", 21, 36),
        ("a(clamp(key - query, m, n) + 20)", 0, 36),
        ("a(min(query - key + n, m) + 9)", 56, None),
        ("float(clamp(m * 2 - 3 * (query - key), -n, m * 3))", 17, 12),
        ("where(key - query < n, 1.0 * (query - key), x)", 21, 1),
        ("max(query - key, 0) * x", 1, 1),
        ("3.0 * max(2 * (query - key) - 7, 3)", 6, 1),
        ("-(x - 0.5 * relu(key - query)) / 0.3", 1, 1),
        ("where(abs(query - key) > 100, -INF, x)", 101, 101),
        ("where(query - key >= 30, x, sin(0.1 * (query - key)))", 31, None),
        ("where(a(head) > 0.5, a(min(query - key, 5) + 600), x)", 6, None),
        ("float(min(query - key, 600))", None, 1),  # the other side is too far away
        ("exp(0.1 * (query - key))", None, None),
        ("abs(0.5 * (query - key))", None, None),
        ("float((query - key) % 8)", None, None),
        ("float((query - key) * (query - key))", None, None),
        ("where(a(head) > 0.5, 1.0 * (query - key), 0.0)", None, None),
        ("max(a(head), 0.01 * (query - key))", None, None),
        ("a(query - key + 600)", None, None),
    ],
)
def test_lines(number, behind, ahead):
    tree = Text(f"score + ({number})", "", CAPTURES).score_tree.args[1]
    found = far_from_diagonal(tree)
    if behind is ahead is None:
        assert found is None
        return
    for sign, bounds, wanted in ((1, found.behind, behind), (-1, found.ahead, ahead)):
        assert (bounds is None) == (wanted is None)
        if bounds is None:
            continue
        first = least(bounds, first=0 if sign > 0 else 1)
        assert first == wanted
        distances = sign * numpy.arange(first, REACH)
        slope = 0.0 if found.slope is None else value_of(found.slope, distances)
        values = value_of(tree, distances)
        finite = numpy.isfinite(values)
        assert finite.all() or not finite.any()
        if finite.all():
            line = values[0] + slope * (distances - distances[0])
            numpy.testing.assert_allclose(values, line, rtol=1e-9)


def test_the_header_of_a_line():
    """The slope is that of the score. Only the forward has it."""
    text = Text("2.0 - head + (score - a(head) * abs(query - key))", "", CAPTURES[:1])
    forward, backward = text.header("fwd"), text.header("bwd")
    assert text.has_line and "#define USER_FAR" in forward and "int(TextParts::LINE)" in forward
    assert "TextParts::DISTANCE" not in forward  # near tiles compute the text itself
    assert "  return -where(query >= key, t1 * 1.0f, t1 * -1.0f);" in forward
    assert "USER_PARTS" not in backward and "USER_FAR" not in backward


def test_a_constant_far_away():
    """Both passes have it, and near tiles read it from shared memory."""
    text = Text("score + a(clamp(key - query, n, 7) + 20)", "", CAPTURES[:2])
    for pass_ in ("fwd", "bwd"):
        lines = text.header(pass_).splitlines()
        assert "#define USER_FAR" in lines
        assert (
            "#define USER_PARTS (int(TextParts::DISTANCE) | int(TextParts::SHIFT) | "
            "int(TextParts::SLOPE))" in lines
        )
        assert "  far.raise(far.ahead, (int64_t(captures.n()) * 1 + 0) / 1 + 1);" in lines
        assert "  far.raise(far.ahead, (7) / 1 + 1);" in lines
    assert not text.has_line


@pytest.mark.parametrize(
    "text",
    [
        "score * 2.0 - abs(query - key)",
        "score - abs(query - key) + x * query",
        "score - abs(query - key) - a(head) * max(query - key, 0)",  # two of them
        "tanh(score) - abs(query - key)",
        "abs(query - key) - score",
    ],
)
def test_scores_without_a_line(text):
    read = tuple(x for x in CAPTURES if f"{x.name}(" in text or f"{x.name} " in text)
    assert not Text(text, "", read).has_line
