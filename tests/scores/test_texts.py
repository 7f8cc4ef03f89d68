"""Texts of scores and masks: what they mean, what functions become, and what errors say."""
# ruff: noqa: E501

import copy
import functools
import math
import pickle
import struct
import types

import numpy
import pytest
from fakes import Stream, fake_cupy, fake_graphs

import cupyflash
from cupyflash.ops.attention.captures import PackedCaptures
from cupyflash.ops.attention.kind import Features, Kind
from cupyflash.ops.attention.masks import MaskTilesLaunch
from cupyflash.ops.attention.options import Options
from cupyflash.ops.attention.score_text import Capture, Text, tiles, tree
from cupyflash.ops.attention.score_text.call import TextCall
from cupyflash.ops.attention.score_text.checks import check_text
from cupyflash.ops.attention.score_text.encode import decode_text, encode_text
from cupyflash.ops.attention.score_text.evaluate import Evaluation
from cupyflash.ops.attention.score_text.parse import parse
from cupyflash.ops.attention.score_text.pieces import of_pieces, values_of_pieces
from cupyflash.ops.attention.score_text.scores import written
from cupyflash.ops.attention.score_text.write import to_text
from cupyflash.ops.attention.sm90.backward import backward_candidates
from cupyflash.runtime import scratch
from cupyflash.runtime.array import View

TABLE = numpy.arange(12, dtype="float32").reshape(3, 4)
DOC = numpy.array([0, 0, 1, 1, 2], "int32")
CAPTURES = (Capture("table", "float32", 2), Capture("doc", "int32", 1), Capture("n", "int", 0))
VALUES = {"table": TABLE, "doc": DOC, "n": 3}


def value(text, mask=False, **variables):
    """The value of a text at one place, or at several."""
    places = {"score": numpy.float64(0.5), "batch": 1, "head": 2, "query": 4, "key": 3} | variables
    places = {name: numpy.asarray(x) for name, x in places.items()}
    found = Evaluation(parse(text, CAPTURES, mask), places, VALUES)
    return found.value


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("score + 2 * 3 - 4", 2.5),
        ("-score * -2", 1.0),
        ("7 / 2 + score", 3.5),  # integers divide as in C++
        ("-7 / 2 + score", -2.5),
        ("7 / 2.f + score", 4.0),
        ("-7 % 3 + 0.0", -1.0),
        ("mod(-7, 3) + floor_div(-7, 2) + 0.0", -2.0),
        ("mod(-7.5, 2) + floor_div(-7.5, 2)", -3.5),
        ("key < query ? score : 1", 0.5),
        ("key > query ? 1 : key == 3 ? 2 : 3", 2.0),
        ("where(!(key < query) || n == 3 && head != 2, 1, 0.25)", 0.25),
        ("(1 << 3 | 1) ^ 2", 11.0),
        ("query & 6 | key & ~1", 6.0),
        ("0x1F + 1e1f + .5", 41.5),
        ("table(head, key - 1) + doc(query) + n", 15.0),
        ("gap = query - key; twice = gap + gap; score + twice * gap", 2.5),
        ("max(key, 2) + min(score, 0.25) + clamp(query, 0, 2) + abs(-3)", 8.25),
        ("pow(score, 2) + pow(4.0, score)", 2.25),
        ("tanh(score) + sigmoid(score) + exp2(score)", math.tanh(0.5) + 1 / (1 + math.exp(-0.5)) + 2**0.5),
        ("float(int(2.75)) + floor(-0.5)", 1.0),
        ("PI * 1", math.pi),
        ("true ? -INF : score", -math.inf),
    ],
)  # fmt: skip
def test_value(text, wanted):
    """Also of the text that is written of the tree."""
    assert float(value(text)) == pytest.approx(wanted, rel=1e-12)
    again = to_text(parse(text, CAPTURES))
    assert float(value(again)) == float(value(text))
    assert to_text(parse(again, CAPTURES)) == again


def test_powers_of_zero_have_finite_derivatives():
    """Of torch, too, by the base where the exponent is 0, and by the exponent where the base is."""
    captures = (Capture("x", "float32", 1, True), Capture("p", "float32", 1, True))
    values = {"x": numpy.array([0.0, 0.0, 2.0]), "p": numpy.array([0.0, 1.5, 2.0])}
    places = {"query": numpy.asarray(0), "key": numpy.arange(3), "score": numpy.zeros(3)}
    tree_ = parse("score + pow(x(key), p(key))", captures)
    _, found = Evaluation(tree_, places, values, ("x", "p")).pull(numpy.ones(3))
    assert found["x"].tolist() == [0, 0, 4]
    assert found["p"].tolist() == pytest.approx([0, 0, 4 * math.log(2)])


def test_guards_of_indices():
    """What a condition hides is not read; anything else outside of an array is an error."""
    keys = numpy.arange(9)
    text = "key < 5 && doc(key) == 1"
    assert value(text, mask=True, key=keys).tolist() == [x in (2, 3) for x in range(9)]
    assert value("key >= 5 || doc(key) == 1", mask=True, key=keys).sum() == 6
    assert value("key < 5 ? doc(key) : 7", key=keys).tolist() == [0, 0, 1, 1, 2, 7, 7, 7, 7]
    for outside in ("doc(key)", "doc(query - key)", "key < 5 ? 1 : doc(key)"):
        with pytest.raises(IndexError, match="doc is read outside of its axis 0 of 5, got index"):
            value(outside, key=keys)


FUNCTIONS = ["exp(x)", "exp2(x)", "log(abs(x))", "log2(x * x)", "tanh(x)", "sigmoid(x)", "erf(x)"]
FUNCTIONS += ["sqrt(abs(x))", "rsqrt(abs(x))", "sin(x)", "cos(x)", "pow(x, 3)", "pow(abs(x), 1.7)"]
FUNCTIONS += [
    "pow(2, x)",
    "pow(x * x + 1, x)",
    "abs(x)",
    "min(x, 0.2)",
    "max(x, 0.3 * x)",
    "relu(x)",
]
FUNCTIONS += ["clamp(x, -0.5, x * x)", "clamp(0.1, x, 1)", "x / (x * x + 1)", "1 / x", "-x - 2 * x"]
FUNCTIONS += [
    "where(x > 0, x * x, sin(x))",
    "where(x > 0, log(x), 0)",
    "floor(x) * x",
    "mod(x, 0.7)",
]


@pytest.mark.parametrize("text", FUNCTIONS)
def test_derivative(text):
    """By the score against differences in float64, and by a captured array, which has x twice."""
    x = numpy.array([-1.3, -0.4, 0.15, 0.6, 1.1])
    step = 1e-6
    places = {name: numpy.asarray(0) for name in ("batch", "head", "query")}
    places["key"] = numpy.arange(5)

    def found(x):
        tree = parse(
            text.replace("x", "(score)").replace("e(score)p", "exp").replace("ma(score)", "max"), ()
        )
        return Evaluation(tree, places | {"score": x}, {})

    wanted = (found(x + step).value - found(x - step).value) / (2 * step)
    slope, _ = found(x).pull(numpy.ones(5))
    numpy.testing.assert_allclose(slope, wanted, rtol=2e-8, atol=2e-9)
    learning = (Capture("c", "float32", 1),)
    again = text.replace("x", "c(key)").replace("ec(key)p", "exp").replace("mac(key)", "max")
    tree = parse(f"score + {again}", learning)
    scores = {"score": numpy.zeros((3, 5))}
    _, of_c = Evaluation(tree, places | scores, {"c": x}, ("c",)).pull(numpy.ones((3, 5)))
    numpy.testing.assert_allclose(of_c["c"], 3 * slope, rtol=1e-12)


@pytest.mark.parametrize(
    "text, kind, fact, place",
    [
        ("score + keyy", ValueError, "an unknown name; names are score, batch, head, query, key", "keyy"),
        ("score + bias(key)", ValueError, "an unknown function or capture", "bias"),
        ("score + table(head)", ValueError, "table has 2 axes and needs as many indices, got 1", "table(head)"),
        ("score + doc", ValueError, "doc has 1 axes and needs as many indices, got 0", "doc"),
        ("score + table(head, score)", TypeError, "an index of table must be an integer", "score"),
        ("score + doc(key * 0.5)", TypeError, "an index of doc must be an integer", "key * 0.5"),
        ("key < query", TypeError, "a score must be a number", "key < query"),
        ("score +", ValueError, "expected a number, a name or a parenthesis, got the end", ""),
        ("score @ 2", ValueError, "a text has no '@'", "@"),
        ("(score + 1", ValueError, "expected ), got the end of the text", ""),
        ("score 2", ValueError, "expected an operator or the end of the text, got '2'", "2"),
        ("where(key & 1 == 0, 1, 2)", ValueError, "a comparison beside & needs parentheses", "1 == 0"),
        ("where(1 < key < 3, 1, 2)", ValueError, "a comparison beside < needs parentheses", "1 < key"),
        ("score % 2", TypeError, "% takes integers (mod(a, b) takes floats)", "score"),
        ("where(score, 1, 2)", TypeError, "where takes a condition first, got a float", "score"),
        ("exp(score, 2)", ValueError, "exp takes 1 argument, got 2", "exp(score, 2)"),
        ("doc(int(score))", TypeError, "int() of what depends on the score", "int(score)"),
        ("010 + score", ValueError, "C++ takes a number that begins with 0 for an octal", "010"),
        ("score = 3; score", ValueError, "a part needs a name that nothing else has", "score"),
        ("99999999999999999999 + score", ValueError, "integers must fit 64 bits", "99999999999999999999"),
    ],
)  # fmt: skip
def test_errors_of_texts(text, kind, fact, place):
    """The line of the text and, below the place, carets."""
    text = f"unused = 3;\n{text}"
    given = {name: x for name, x in VALUES.items() if name in text}
    with pytest.raises(kind) as error:
        cupyflash.Score(text, **given)
    message, line, carets = str(error.value).split("\n")
    assert message.startswith("cupyflash.Score: ") and fact in message
    assert line.strip() == text.split("\n")[1]
    assert line[carets.index("^") :].startswith(place) and carets.count("^") == max(1, len(place))


def test_other_errors():
    for wrong, kind, fact in (
        (lambda: cupyflash.Score(3), TypeError, "allowed are a function of (score, batch, head, "),
        (lambda: cupyflash.Score("score", n=3), ValueError, "must read each array and number"),
        (lambda: cupyflash.Score("score + head", head=3), ValueError, "cannot have this name"),
        (lambda: cupyflash.Score("score + new", new=3), ValueError, "cannot have this name"),
        (lambda: cupyflash.Score("score + c", c="x"), TypeError, "c must be an array or a number"),
        (
            lambda: cupyflash.Score("score + c(key)", c=TABLE[0].astype("float64")),
            TypeError,
            "c must be float32, float16, bfloat16, int32, int64, uint8, bool, got float64 (write",
        ),
        (lambda: cupyflash.Score("score + n", n=2**40), ValueError, "n must fit 32 bits"),
        (lambda: cupyflash.Score("score + n", n=numpy.array(2**40)).values, ValueError, "n must fit 32 bits, got 1099511627776"),
        (lambda: cupyflash.Score("score + n", n=numpy.array(1j)).values, TypeError, "n must be a real number, got 1j"),
        (lambda: cupyflash.Mask("score < 3"), ValueError, "an unknown name; names are batch,"),
        (lambda: cupyflash.Mask("key + 1"), TypeError, "a mask must be a condition"),
        (
            lambda: cupyflash.Score("+".join(f"c{i}" for i in range(130)), **{f"c{i}": i for i in range(130)}),
            ValueError,
            "captures take 8 bytes and 8 for each axis, 1024 at most, got 1040",
        ),
        (lambda: cupyflash.Score("(" * 5000 + "score"), ValueError, "nested too deeply"),
        (lambda: cupyflash.Score("score").cuda("both"), ValueError, "must be 'fwd' or 'bwd'"),
    ):  # fmt: skip
        with pytest.raises(kind) as error:
            wrong()
        assert fact in str(error.value), str(error.value)


N = 7  # a variable: an argument of the kernels
SLOPES = numpy.linspace(0, 1, 4, dtype="float32")
HALVES = SLOPES.astype("float16")


def helper(query, key):
    return SLOPES[0] + SLOPES[query - key]


@pytest.mark.parametrize(
    "function, text",
    [
        (lambda s, b, h, q, k: s - SLOPES[h] * abs(q - k), "score - SLOPES(head) * abs(query - key)"),
        (lambda s, b, h, q, k: s + TABLE[h][k] + TABLE[h, q + 1], "score + TABLE(head, key) + TABLE(head, query + 1)"),
        (lambda s, b, h, q, k: 50 * numpy.tanh(s / 50), "50.0 * tanh(score / 50.0)"),
        (lambda s, b, h, q, k: s * N + q / 2, "score * n1 + query / 2.0"),
        (lambda s, b, h, q, k: s + q / (k + 1) - 1 / (k + N), "score + float(query) / (key + 1) - 1.0 / (key + n1)"),
        (lambda s, b, h, q, k: -s if N else s, "-score"),
        (lambda s, b, h, q, k: numpy.where((q >= k) & ~(k == 3), s, -numpy.inf), "where(query >= key && !(key == 3), score, -INF)"),
        (lambda s, b, h, q, k: s + (q // 16 == k // 16), "score + (floor_div(query, 16) == floor_div(key, 16))"),
        (lambda s, b, h, q, k: s + (q % 4 << 1 | k & 3), "score + (mod(query, 4) << 1 | key & 3)"),
        (lambda s, b, h, q, k: 2 - s**2 + 2**s, "2.0 - pow(score, 2) + pow(2.0, score)"),
        (lambda s, b, h, q, k: s.clip(-1, 1) + numpy.minimum(q, 3), "clamp(score, -1.0, 1.0) + min(query, 3)"),
        (lambda s, b, h, q, k: s.clip(a_min=-1) + numpy.fabs(q - k) * numpy.fabs(q), "max(score, -1.0) + abs(float(query - key)) * abs(float(query))"),
        (lambda s, b, h, q, k: s * (s + 1) * (s + 1), "score * (score + 1.0) * (score + 1.0)"),
        (lambda s, b, h, q, k: (lambda x: x * x)(s + 1), "t1 = score + 1.0; t1 * t1"),
        (lambda s, b, h, q, k: s + helper(q, k), "score + (n1 + SLOPES(query - key))"),
        (lambda s, b, h, q, k: 0, "0.0"),
        (functools.partial(lambda s, b, h, q, k, cap: cap * numpy.tanh(s / cap), cap=3.5), "n2 * tanh(score / n1)"),
        (lambda s, b, h, q, k, slopes=SLOPES: s * slopes[h], "score * slopes(head)"),
        (lambda s, b, h, q, k: s + HALVES[h].astype("float16") + (q > k).half(), "score + HALVES(head) + float(query > key)"),
        (lambda s, b, h, q, k: s + (q / 3).astype("i4") + (q / 5).astype("int64", "C"), "score + int(query / 3.0) + int(query / 5.0)"),
        (lambda s, b, h, q, k: numpy.fmax(s, q), "where(score >= query || query != query, score, query)"),
        (lambda s, b, h, q, k: numpy.where(~numpy.maximum(q > k, k < 3), s, 0), "where(!(query > key || key < 3), score, 0.0)"),
        (lambda s, b, h, q, k: numpy.where(~numpy.fmin(q > k, k < 3), s, 0), "where(!(query > key && key < 3), score, 0.0)"),
        (lambda s, b, h, q, k: s.double() + q.float() + numpy.zeros_like(s, "float16"), "score + float(query) + 0.0"),
    ],
)  # fmt: skip
def test_functions_of_numpy(function, text):
    assert cupyflash.Score(function).text == text


def test_functions_of_torch():
    """torch's functions and methods, as FlexAttention's users write them."""
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    doc, length, temperature = torch.zeros(9, dtype=torch.int64), torch.tensor(7), torch.ones(())
    temperature.requires_grad_()
    table = torch.zeros(4, 9)
    for function, text in (
        (lambda s, b, h, q, k: s + table[h, torch.clamp(k - q, -4, 4) + 4], "score + table(head, clamp(key - query, -4, 4) + 4)"),
        (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), "where(query >= key, score, -INF)"),
        (lambda s, b, h, q, k: s * temperature, "score * temperature"),
        (lambda s, b, h, q, k: temperature * s.tanh(), "temperature * tanh(score)"),
        (lambda s, b, h, q, k: s.masked_fill((q - k).abs() > 3, 0.5), "where(abs(query - key) > 3, 0.5, score)"),
        (lambda s, b, h, q, k: torch.div(q, 2, rounding_mode="floor") + s.to(torch.float32), "floor_div(query, 2) + score"),
        (lambda s, b, h, q, k: F.silu(s) + F.relu(s).square(), "t1 = relu(score); score * sigmoid(score) + t1 * t1"),
        (lambda s, b, h, q, k: s + table[h][(q.float() / 2).long()], "score + table(head, int(float(query) / 2.0))"),
        (lambda s, b, h, q, k: s.sigmoid() + torch.logical_and(q > k, k > 2), "sigmoid(score) + (query > key && key > 2)"),
        (lambda s, b, h, q, k: s + (q / 3).type(torch.IntTensor), "score + int(query / 3.0)"),
        (lambda s, b, h, q, k: s + (q / 3).type("torch.cuda.LongTensor"), "score + int(query / 3.0)"),
        (lambda s, b, h, q, k: s + (q / 3).to("cpu", torch.int32, True), "score + int(query / 3.0)"),
        (lambda s, b, h, q, k: s + (q / 3).to(doc.device).type_as(doc), "score + int(query / 3.0)"),
        (lambda s, b, h, q, k: torch.zeros_like(s) + torch.rsqrt(q + 1.0), "0.0 + rsqrt(query + 1.0)"),
    ):  # fmt: skip
        assert cupyflash.Score(function).text == text
    for function, text in (
        (lambda b, h, q, k: (doc[q] == doc[k]) & (q >= k), "doc(query) == doc(key) && query >= key"),
        (lambda b, h, q, k: (k < length) | (q - k).bool(), "key < length || bool(query - key)"),
        (lambda b, h, q, k: b.new_ones(size=(), dtype=torch.bool), "true"),
        (lambda b, h, q, k: ~torch.maximum(q > k, k < 3), "!(query > key || key < 3)"),
        (lambda b, h, q, k: (q ^ k) & 1 == 0, "((query ^ key) & 1) == 0"),
    ):  # fmt: skip
        mask = cupyflash.Mask(function)
        assert mask.text == text, mask.text
    half = table.half()
    for function, got in (
        (lambda s, b, h, q, k: s.type(torch.HalfTensor), "float16"),
        (lambda s, b, h, q, k: s.type("torch.BFloat16Tensor"), "bfloat16"),
        (lambda s, b, h, q, k: s.type_as(half), "float16"),
        (lambda s, b, h, q, k: s.to("cpu", torch.float16), "float16"),
        (lambda s, b, h, q, k: s.to(device="cpu", dtype=torch.float16), "float16"),
    ):
        with pytest.raises(NotImplementedError, match=f"rounded to another .* got {got}"):
            cupyflash.Score(function)


def test_functions_of_cupy():
    cupy = pytest.importorskip("cupy")
    score = cupyflash.Score(lambda s, b, h, q, k: cupy.where(q > k, cupy.tanh(s), cupy.abs(q - k)))
    assert score.text == "where(query > key, tanh(score), abs(query - key))"


def branch(s, b, h, q, k):
    if q > k:
        return s
    return 0


@pytest.mark.parametrize(
    "function, kind, fact, code",
    [
        (branch, TypeError, "a condition has no truth while a function is traced", "q > k"),
        (lambda s, b, h, q, k: s if q > k else 0, TypeError, "where(condition, a, b)", ""),
        (lambda s, b, h, q, k: max(q, k), TypeError, "maximum, got key > query", "max(q, k)"),
        (lambda s, b, h, q, k: s + SLOPES[h / 2], TypeError, "an index of SLOPES must be an integer", "SLOPES[h / 2]"),
        (lambda s, b, h, q, k: TABLE[h, -1], ValueError, "an index counts from 0", "TABLE[h, -1]"),
        (lambda s, b, h, q, k: s + TABLE[h], ValueError, "TABLE has 2 axes and needs as many", "s + TABLE[h]"),
        (lambda s, b, h, q, k: s.frobnicate(), NotImplementedError, "frobnicate is no function of scores", "s.frobnicate()"),
        (lambda s, b, h, q, k: s.clamp(), TypeError, "clamp takes min, max or both in a score, got neither", "s.clamp()"),
        (lambda s, b, h, q, k: s.clamp(0, 1, 2), TypeError, "clamp in a score: too many positional arguments", "s.clamp(0, 1, 2)"),
        (lambda s, b, h, q, k: s.clamp(minimum=0), TypeError, "clamp in a score: got an unexpected keyword argument 'minimum'", "s.clamp(minimum=0)"),
        (lambda s, b, h, q, k: s.add(q, 2), TypeError, "add takes 2 arguments in a score, got 3", "s.add(q, 2)"),
        (lambda s, b, h, q, k: s.gelu("exact"), ValueError, "approximate of gelu must be 'none' or 'tanh', got 'exact'", 's.gelu("exact")'),
        (lambda s, b, h, q, k: s.clamp_(0, 1), NotImplementedError, "changes nothing in place, allowed is clamp", "s.clamp_(0, 1)"),
        (lambda s, b, h, q, k: s + (q - k).astype("uint8"), TypeError, "integers of 32 bits, got uint8", '(q - k).astype("uint8")'),
        (lambda s, b, h, q, k: s + (q - k).astype(numpy.uint32), TypeError, "integers of 32 bits, got uint32", "(q - k).astype(numpy.uint32)"),
        (lambda s, b, h, q, k: s + (q - k).astype("u8"), TypeError, "integers of 32 bits, got uint64", '(q - k).astype("u8")'),
        (lambda s, b, h, q, k: s.astype("<f2"), NotImplementedError, "float64, got float16", 's.astype("<f2")'),
        (lambda s, b, h, q, k: s.half(), NotImplementedError, "no part of it is rounded to another dtype, allowed are float32 and float64, got float16", "s.half()"),
        (lambda s, b, h, q, k: s + q.bfloat16(), NotImplementedError, "float64, got bfloat16", "q.bfloat16()"),
        (lambda s, b, h, q, k: s.to(HALVES), NotImplementedError, "float64, got float16", "s.to(HALVES)"),
        (lambda s, b, h, q, k: s.to(other=HALVES), NotImplementedError, "float64, got float16", "s.to(other=HALVES)"),
        (lambda s, b, h, q, k: s + TABLE[h, k].astype(HALVES.dtype), NotImplementedError, "float64, got float16", "TABLE[h, k].astype(HALVES.dtype)"),
        (lambda s, b, h, q, k: s + HALVES[h].astype("float8_e4m3fn"), NotImplementedError, "float64, got float8", ""),
        (lambda s, b, h, q, k: s + (q - k).short(), TypeError, "integers of 32 bits, got int16", "(q - k).short()"),
        (lambda s, b, h, q, k: [s for _ in range(k)][0], TypeError, "is no Python number", "range(k)"),
        (lambda s, b, h, q, k: None, TypeError, "the function returns nothing", ""),
        (lambda s, b, h, q, k: (s, s), TypeError, "a function returns one score, got 2", ""),
        (lambda s, b, h, q, k: "s", TypeError, "got a str", ""),
        (lambda s, b, h, q, k: q > k, TypeError, "a score must be a number", ""),
        (lambda s, b, h, q, k: s * float("nan"), ValueError, "a score cannot be NaN", 's * float("nan")'),
        (lambda s, b, h, q, k: float("nan"), ValueError, "a score cannot be NaN", ""),
    ],
)  # fmt: skip
def test_errors_of_functions(function, kind, fact, code):
    """The line of the function, and from Python 3.11 on carets below the place."""
    with pytest.raises(kind) as error:
        cupyflash.Score(function)
    message = str(error.value)
    assert message.startswith("cupyflash.Score: ") and fact in message, message
    if code:
        assert f"{__file__}:" in message
        *_, line, carets = message.split("\n") if "^" in message else (*message.split("\n"), "")
        assert code in line and (not carets or line[carets.index("^") :].startswith(code)), message


def test_arrays_of_objects_are_given_by_keyword():
    class Module:
        slopes = SLOPES

        def score(self, s, b, h, q, k):
            return s * self.slopes[h]

    with pytest.raises(TypeError, match="give arrays that an object holds by keyword"):
        cupyflash.Score(Module().score)
    score = cupyflash.Score(
        lambda s, b, h, q, k, *, slopes, n: s * slopes[h] + n, slopes=SLOPES, n=3
    )
    assert score.text == "score * slopes(head) + n"
    assert [x.name for x in score.captures] == ["n", "slopes"] and score.values[0] == 3


def test_numbers_and_arrays_do_not_change_the_text():
    """Other values give the same text, and with it the same kernels."""

    def made(window, table):
        score = lambda s, b, h, q, k: s + table[h, k] * window
        mask = lambda b, h, q, k: q - k <= window
        return written("attention", score, mask)

    (text, first), (again, second) = made(100, TABLE), made(200, numpy.ones((5, 9), "float32"))
    assert text == again and text.header("bwd") == again.header("bwd")
    assert text.mask == "query - key <= n2" and first[1:] == (100, 100) and second[1:] == (200, 200)
    assert first[0] is TABLE


def test_numbers_in_host_memory_are_read_at_each_call():
    """A `Score` that is made once sees what an array without axes holds later."""
    cap, flag = numpy.array(2.0), numpy.array(True)
    score = cupyflash.Score(lambda s, b, h, q, k: numpy.where(flag, s * cap, s))
    text = cupyflash.Score("score * cap", cap=cap)
    assert score.text == "where(bool(flag), score * cap, score)"
    assert sorted(score.values) == [1, 2] and text.values == (2,)
    cap[...], flag[...] = 5, False
    assert sorted(score.values) == [0, 5] and text.values == (5,)
    fixed = numpy.float32(0.5)  # no array
    assert cupyflash.Score(lambda s, b, h, q, k: s * fixed).values == (0.5,)


def test_numbers_beyond_float32_are_infinite():
    """The kernels take numbers of 32 bits; what masks as -1e39 in a variable or the code masks."""
    least = -1e39
    lowest = numpy.array(numpy.finfo("float64").min)
    for score in (
        cupyflash.Score(lambda s, b, h, q, k: s + least),
        cupyflash.Score("score + least", least=least),
        cupyflash.Score("score + least", least=lowest),
    ):
        assert PackedCaptures(score.alone, [None])(score.values)[:4] == struct.pack("f", -math.inf)
    assert cupyflash.Score(lambda s, b, h, q, k: s + 1e39).text == "score + INF"
    assert "score - INF" in cupyflash.Score("score - 1e39").cuda("fwd")
    assert cupyflash.Score(lambda s, b, h, q, k: s + 3.4028235e38).text == "score + 3.4028235e+38"


def test_an_array_of_both_stands_once():
    score = cupyflash.Score(lambda s, b, h, q, k: s + TABLE[0, k] if N else s)
    mask = cupyflash.Mask(lambda b, h, q, k: TABLE[h, k] > 0)
    other = cupyflash.Mask("TABLE(key) == 1", TABLE=DOC)
    text, values = written("attention", score, mask)
    assert [x.name for x in text.captures] == ["TABLE"] and values[0] is TABLE
    text, values = written("attention", score, other)
    assert text.mask == "TABLE2(key) == 1" and values[1] is DOC


def bent(s, b, h, q, k):
    gap = q - k
    return s + gap * gap  # the trace calls the gap t1


def band(b, h, q, k):
    gap = q - k
    return (gap >= 0) & (gap < 4)


OF_T1 = [
    (bent, cupyflash.Mask("t1(key) == 1", t1=DOC)),
    (cupyflash.Score("score + t1(key)", t1=DOC), band),
    (cupyflash.Score("t1 = query * 2.0; score + t1"), cupyflash.Mask("t1(key) == 1", t1=DOC)),
]


@pytest.mark.parametrize("score, mask", OF_T1, ids=["score", "mask", "texts"])
def test_a_part_has_no_name_of_the_other_captures(score, mask):
    text, values = written("attention", score, mask)
    captures = {x.name: value for x, value in zip(text.captures, values)}
    query, key = numpy.arange(5).reshape(5, 1), numpy.arange(5)
    variables = {"query": query, "key": key, "score": numpy.zeros((5, 5))}
    trees = text.score_tree, text.mask_tree
    found = [Evaluation(tree_, variables, captures).value for tree_ in trees]
    gap = query - key
    wanted_score = gap**2 if score is bent else DOC if mask is band else 2 * query
    wanted_mask = (gap >= 0) & (gap < 4) if mask is band else DOC == 1
    assert (found[0] == wanted_score).all() and (found[1] == wanted_mask).all()
    moved = of_pieces(text, frozenset({"query"}))  # a text that is written anew
    assert moved.score_tree is not None and moved.mask_tree is not None


def test_header():
    """The generated code: casts, divisions, parts; the order of captures, padded to 64 bytes."""
    text = Text(
        "gap = query - key; where(gap < n, score / 3 + gap * gap, score) + table(head, key)",
        "doc(query) == doc(key)",
        (*CAPTURES, Capture("cap", "float", 0)),
    )
    headers = [text.header(x).splitlines() for x in ("fwd", "bwd")]
    for line in (
        "#define USER_SCORE true",
        "#define USER_MASK true",
        "  Capture<float, 2> table;",
        "  Capture<int, 1> doc;",
        "  Number<int> n;",
        "  Number<float> cap;",
        "  uint8_t padding[8];",
        "  const auto t1 = query - key;",
        "  return N(where(t1 < captures.n(), divide(score, 3.0f) + float(t1 * t1), score) + captures.table(head, key));",
        "  return captures.doc(query) == captures.doc(key);",
    ):  # fmt: skip
        assert line in headers[0] and line in headers[1], headers
    assert "user_mask" not in Text("score", "", ()).header("fwd")
    assert cupyflash.Score("score * 2").cuda("fwd").startswith("#define USER_SCORE true")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("score * abs(query - key)", "score * abs(distance(query, key))"),
        ("score - float(-(key - query))", "score - -(distance(key, query))"),
        (
            "score + clamp(key - query, -3, n) * 0.5",
            "score + float(clamp(key - query, -3, captures.n())) * 0.5f",
        ),
        (
            "score + clamp(key - query, -3, 4) * 0.5",
            "score + clamp(distance(key, query), -3.0f, 4.0f) * 0.5f",
        ),
        ("score + (query - key) % 3 * 0.5", "score + float((query - key) % 3) * 0.5f"),
        ("score + (query - query) * 0.5", "score + float(query - query) * 0.5f"),
    ],
)
def test_distances_become_floats_once_a_row(text, wanted):
    """Where query - key alone decides, within the integers that floats have."""
    captures = (Capture("n", "int", 0),) if "n)" in text else ()
    assert f"  return N({wanted});" in Text(text, "", captures).header("fwd").splitlines()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("n * tanh(score / n)", ("divide(score, captures.n())", "captures.n() * bounded")),
        ("t = tanh(score + 1); t * t - score", ("score + 1.0f", "bounded * bounded - score")),
        (
            "where(query < key, score, -tanh(score) / 2)",
            ("score", "where(query < key, score, divide(-bounded, 2.0f))"),
        ),
        ("where(tanh(score) > 0, score, 1)", None),  # a NaN of the tanh gives 1
        ("max(tanh(score), 0)", None),
        ("tanh(score) + tanh(score / 2)", None),
        ("score + tanh(0.1 * key)", None),
    ],
)
def test_tanh_is_a_function_of_its_own(text, parts):
    """The only one of a score, and where a NaN of it reaches the score."""
    captures = (Capture("n", "float", 0),) if "n)" in text else ()
    lines = Text(text, "", captures).header("fwd").splitlines()
    found = [lines[i + 1] for i, x in enumerate(lines) if x.endswith(('argument"', 'of_tanh"'))]
    assert found == [f"  return N({x});" for x in parts or ()]
    assert ("#define USER_TANH" in lines) == bool(parts)


@pytest.mark.parametrize(
    ("text", "light"),
    [
        ("score", True),
        ("score - n * abs(query - key)", True),
        ("score + exp(0.1 * clamp(key - query, -9, 9))", True),  # one number far from the diagonal
        ("score * exp(0.1 * query) + log(1.0 + key)", True),  # a slope of a part
        ("n + (score + key) - query", True),
        ("t = score + 1; t - key", True),
        ("n - score", False),
        ("score + 1 - (key - score)", False),
        ("score + score", False),
        ("score + tanh(score)", False),
        ("2.0 * score", False),
        ("where(key < query, score, -INF)", False),
        ("score + exp(0.1 * (key - query))", False),  # each distance has a part
    ],
)
def test_scores_that_take_few_registers(text, light):
    """The backward has larger tiles where no score has a number of its own."""
    captures = (Capture("n", "float", 0),) if "n " in text else ()
    features = Features(text=Text(text, "", captures))
    assert features.bends_scores != light
    kind = Kind("bfloat16", 64, features, (9, 0))
    assert list(backward_candidates(kind))[-1] == (64, 128)
    assert next(iter(backward_candidates(kind))) == ((128, 128) if light else (64, 128))


MOVED = (
    "gap = query - key; score + gap * gap + 100.0 * head + 7 * batch + (key - query) / 3 + key % 5 + "
    "query * 0.5 + where(query > key, table(head % 3, key % 4), float(batch))"
)


@pytest.mark.parametrize(
    "names",
    [(), ("head",), ("batch", "head"), ("batch", "query"), ("key",), tuple(tree.NAMES)[1:]],
    ids=str,
)
def test_a_text_of_pieces_counts_from_elsewhere(names):
    """Its value at the places of a call is that of the text at those of the whole."""
    text, places = Text(MOVED, "", CAPTURES[:1]), {"batch": 1, "head": 2, "query": 4, "key": 3}
    pieces = numpy.array([[0, 32], [0, 16], [5, 9]], "int32")  # queries, keys and sequences
    found = of_pieces(text, frozenset(names))
    values = values_of_pieces(found, (TABLE,), pieces, 6, 8)
    moved = {"batch": 9, "head": 2 + 6, "query": 4 + 32, "key": 3 + 16}
    whole = {name: moved[name] if name in names else x for name, x in places.items()}
    results = []
    for one, at, given in ((text, whole, (TABLE,)), (found, places, values)):
        at = {name: numpy.asarray(x) for name, x in at.items()} | {"score": numpy.float64(0.5)}
        named = {x.name: y for x, y in zip(one.captures, given, strict=True)}
        results.append(Evaluation(one.score_tree, at, named).value)
    assert results[0] == results[1]
    assert (found == text) == (names == ())
    assert decode_text(encode_text(found)) == found


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("query",), "distance(query, key, captures.pieces__(0, batch))"),
        (("key",), "distance(query, key, -captures.pieces__(1, batch))"),
        (
            ("query", "key"),
            "distance(query, key, (captures.pieces__(0, batch) - captures.pieces__(1, batch)))",
        ),
    ],
)
def test_distances_of_pieces(names, wanted):
    text = of_pieces(Text("score - abs(query - key)", "", ()), frozenset(names))
    assert f"  return N(score - abs({wanted}));" in text.header("fwd").splitlines()


def test_dropout_of_pieces():
    """A text that says where dropout begins; older strings of texts, in kept graphs, say nothing."""
    text = of_pieces(Text("", "", (), drops=True), frozenset())
    assert [x.name for x in text.captures] == ["pieces__", "first_head__", "heads__"]
    assert "#define USER_DROPOUT" in text.header("fwd") and "first_weight" in text.header("bwd")
    pieces = numpy.array([[0, 32], [0, 16], [5, 9]], "int32")
    call = TextCall(text, values_of_pieces(text, (), pieces, 6, 8), first_batch=1)
    assert call.first_weight == (9 * 8 + 6, 32, 16)
    assert decode_text(encode_text(text)) == text
    assert decode_text('["score * 2", "", []]') == Text("score * 2", "", ())
    assert TextCall(Text("score", "", ()), ()).first_weight is None


def test_strides_of_captures():
    """The kernels hold that of the last axis in 32 bits, in bytes."""

    def check(*strides):
        text = Text("score + table(head, key)", "", (Capture("table", "float32", 2),))
        view = View((2, 2), strides, "float32", -1)
        check_text("attention", Options(text=text), {}, (view,), view, {})

    check(2**31 - 1, 2**29 - 1)
    with pytest.raises(ValueError, match="the last stride of table must be less than .* bytes"):
        check(2, 2**29)
    with pytest.raises(ValueError, match="the strides of table must be less than .* elements"):
        check(2**31, 2)


def test_arrays_that_are_too_short():
    """The kernels read what an index says. A condition may keep it inside, and lengths may."""
    q, k, v = numpy.random.default_rng(0).standard_normal((3, 3, 5, 2, 8), "float32")
    x, y = numpy.zeros((2, 5), "float32"), numpy.zeros(4, "int32")
    with pytest.raises(ValueError, match=r"axis 0 of x must have at least 3 .* \(2, 5\), .* batch"):
        cupyflash.attention(q, k, v, score=cupyflash.Score("score + x(batch, query)", x=x))
    with pytest.raises(ValueError, match=r"axis 0 of y must have at least 5 .* \(4,\), .* by key"):
        cupyflash.attention(q, k, v, mask=cupyflash.Mask("y(key) == 0 && key <= query", y=y))
    right = cupyflash.attention(q, k[:, :4], v[:, :4])
    guarded = cupyflash.attention(q, k, v, mask=cupyflash.Mask("key < 4 && y(key) == 0", y=y))
    numpy.testing.assert_allclose(guarded, right, rtol=1e-5, atol=1e-6)
    mask, lengths = cupyflash.Mask("y(key) == 0", y=y), numpy.full(3, 4, "int32")
    short = cupyflash.attention(q, k, v, mask=mask, seqused_k=lengths)
    numpy.testing.assert_allclose(short, right, rtol=1e-5, atol=1e-6)


def test_tiles_of_streams_and_graphs(monkeypatch):
    """A launch reads no tiles that another stream, or a graph that has not run, may still find."""
    fake, memories, launched = fake_cupy(monkeypatch), [], []
    fake_graphs(monkeypatch, fake)
    monkeypatch.setattr(tiles, "stream_number", lambda stream: stream)
    finder, found = MaskTilesLaunch.__new__(MaskTilesLaunch), tiles.FoundTiles()
    finder.size, finder.key, finder.rest, finder.bits_bytes = 1, ("kernel",), (2, 1, 0, 0), 8
    finder.sort, finder.batch_rows = None, 2
    finder.launch = types.SimpleNamespace(
        argument=lambda *_: b"", with_captures=lambda *_: b"",
        start=lambda stream, _: launched.append(stream.ptr),
    )  # fmt: skip
    library = types.SimpleNamespace(
        empty_float32=lambda *_: memories.append(object()) or memories[-1],
        pointer=lambda x: 64 * (1 + memories.index(x)),
    )

    def memory_on(stream):
        return finder(library, Stream(stream), None, [], b"", found)[0]

    fake.capturing = {3, 4}
    assert memory_on(3) is memories[0] and memory_on(1) is memories[1]
    assert memory_on(1) is memories[1] and memory_on(2) is memories[2]
    assert launched == [3, 1, 2] and not fake.ends
    assert memory_on(4) is memories[1] and launched == [3, 1, 2]
    fake.ends.pop()()  # the graph is gone, which held them until now
    assert scratch.unused_memory.pop() is memories[1]
    for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert again.get(("kernel",), 1) is None  # bits are an address, which is not of a copy
