"""Parts of texts that many scores of a tile share, which the kernels of Hopper compute once."""

from pathlib import Path

import pytest
from emulator import COMPILER
from places import run_script
from targets import few, has

from cupyflash.ops.attention.score_text import Capture, Text
from cupyflash.ops.attention.score_text.parts import taken_out
from cupyflash.ops.attention.score_text.write import to_text

pytestmark = pytest.mark.no_backend
CAPTURES = (
    *(Capture(x, "float32", 1) for x in ("a", "b")),
    Capture("table", "float32", 2),
    Capture("doc", "int32", 1),
)


@pytest.mark.skipif(not (COMPILER and has("torch")), reason="needs g++ and torch")
def test_results(emulated_kernels):
    """Both passes and the gradients of captures against float64."""
    script = Path(__file__).parent / "emulated_parts.py"
    run_script(script, emulated_kernels, *few(), timeout=900)


@pytest.mark.parametrize(
    ("score", "parts", "rest", "kinds"),
    [
        (
            "score + table(head, clamp(key - query, -3, 3) + 3)",
            {"distance": "table(head, clamp(key - query, -3, 3) + 3)"},
            "score + parts.distance",
            "SHIFT SLOPE",
        ),
        (
            "score * sigmoid(a(query)) + b(key)",
            {"query": "sigmoid(a(query))", "key": "b(key)"},
            "score * parts.query + parts.key",
            "SLOPE",
        ),
        ("1.0 - score / a(query)", {"query": "a(query)"}, "1.0 - score / parts.query", "SLOPE"),
        ("a(query) / score", {"query": "a(query)"}, "parts.query / score", ""),
        ("score * exp(score * b(key))", {"key": "b(key)"}, "score * exp(score * parts.key)", ""),
        (
            "score + a(query - key + 9) * query",  # another term may change within a tile
            {"distance": "a(query - key + 9)"},
            "score + parts.distance * query",
            "SLOPE",
        ),
        (
            "score + exp(0.1 * (query - key))",
            {"distance": "exp(0.1 * (query - key))"},
            None,
            "SLOPE",
        ),
        # The longest of several.
        (
            "score + b(key) + exp(a(key))",
            {"key": "exp(a(key))"},
            "score + b(key) + parts.key",
            "SLOPE",
        ),
        # A condition may keep a text from reading outside of an array.
        ("where(key > 3, score + a(key - 4), score)", {}, None, ""),
        (
            "score + where(key > 3, a(key - 4), 0.0)",
            {"key": "where(key > 3, a(key - 4), 0.0)"},
            "score + parts.key",
            "SLOPE",
        ),
        (
            "where(a(key) > 0.0, score, b(key))",
            {"key": "a(key)"},
            "where(parts.key > 0.0, score, b(key))",
            "SLOPE",
        ),
        # Nothing that takes longer than a load from shared memory, or changes with every score.
        ("score - 0.5 * abs(query - key)", {}, None, ""),
        ("score + a(head)", {}, None, ""),
        (
            "score + a(query) * b(key) * (query + key)",
            {"query": "a(query)", "key": "b(key)"},
            None,
            "SLOPE",
        ),
        ("score + a(query + key)", {}, None, ""),
        ("score + float(doc(key) - doc(query))", {}, None, ""),
        ("20.0 * tanh(score / 20.0) + b(key)", {}, None, ""),  # has a way of its own
    ],
)
def test_what_is_a_part(score, parts, rest, kinds):
    read = tuple(x for x in CAPTURES if f"{x.name}(" in score)
    text = Text(score, "", read)
    lines = text.header("bwd").splitlines()
    (macro,) = [x for x in lines if "USER_PARTS" in x] or [""]
    assert bool(macro) == bool(parts)
    for word in ("DISTANCE", "QUERY", "KEY", "SHIFT", "SLOPE"):
        assert (f"TextParts::{word})" in macro) == (word.lower() in parts or word in kinds.split())
    if parts:
        found = taken_out(text.score_tree, "bwd")
        assert {name: to_text(x) for name, x in found.by_variable.items()} == parts
        assert rest is None or to_text(found.rest) == rest


def test_both_passes_have_parts():
    text = Text("score * sigmoid(a(query)) + b(key)", "", CAPTURES[:2])
    for pass_ in ("fwd", "bwd"):
        assert "float part_of_key" in text.header(pass_)
        assert "return N(score * parts.query + parts.key);" in text.header(pass_)


@pytest.mark.parametrize(
    ("score", "form"),
    [
        ("score * sigmoid(a(query)) + b(key)", ("1.0 * sigmoid(a(query))", "0.0", "b(key)")),
        ("b(key) + score", ("1.0", "0.0", "b(key)")),
        (
            "(1.0 - exp(b(key))) - (a(query) - 2.0 * score / a(head)) + head * b(key)",
            ("1.0 * 2.0 / a(head)", "1.0 - a(query)", "-exp(b(key)) + head * b(key)"),
        ),
        ("b(key) - score", None),  # the least score would have the largest weight
        ("score * b(key) + b(key)", None),
        ("score * a(query) + a(query) * b(key)", None),
        ("score + b(key) - abs(query - key)", None),
        ("score * score + b(key)", None),
        ("2.0 / score + b(key)", None),
        ("2.0 * (score + b(key))", None),
        ("score * a(query)", None),
        ("score + 0.5 * key", None),
        # So many sums of a sum with itself have 2**30 terms.
        (
            f"x0 = b(key); {''.join(f'x{i + 1} = x{i} + x{i}; ' for i in range(30))}score + x30",
            None,
        ),
    ],
)
def test_terms_of_keys(score, form):
    """The forward alone has them in the product of Q and K."""
    read = tuple(x for x in CAPTURES if f"{x.name}(" in score)
    text = Text(score, "", read)
    assert text.has_key_terms == bool(form) == ("term_of_key" in text.header("fwd"))
    assert "term_of_key" not in text.header("bwd")
    if form:
        assert tuple(map(to_text, taken_out(text.score_tree, "fwd").key_terms)) == form
        masked = Text(score, "key <= query", read)
        assert not masked.has_key_terms
