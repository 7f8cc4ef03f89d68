"""What `bench decode` measures, on torch's CPU, and the bounds beside it."""

import itertools
import time

import pytest
import torch

from bench.decode import bars, decode
from bench.decode.decode import DecodeProblem, checked_call
from bench.lib import data

SIZES = {"dtype": "bfloat16", "model": "small", "batch": 3, "length": 40}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(data, "DEVICE", "cpu")
    monkeypatch.setitem(decode.HEADS, "small", (4, 2, 16))


@pytest.mark.parametrize(
    "change",
    [
        {"cache": "int8", "page": 3},
        {"cache": "float8_e4m3fn", "tokens": 5},
        {"longest": 70, "tokens": 9, "page": 16},
        {"splits": 2},
        {"batch": 1, "attend_only": True},
    ],
    ids=str,
)
def test_results_are_checked(change, monkeypatch):
    problem = DecodeProblem(**SIZES | change)
    call = checked_call(problem, "cupyflash")
    assert call().shape == (problem.batch, problem.tokens, 4, 16)
    ours = DecodeProblem._ours
    wrong = lambda self, tensors: lambda: ours(self, tensors)() + 0.2  # noqa: E731
    monkeypatch.setattr(DecodeProblem, "_ours", wrong)
    with pytest.raises(AssertionError):
        checked_call(problem, "cupyflash")


def test_numbers_of_8_bits_are_exact():
    """So that 16 bits, and what is computed of them, can be compared."""
    for cache in decode.NARROW:
        for dtype in ("float16", "bfloat16"):
            problem = DecodeProblem(**SIZES | {"cache": cache, "dtype": dtype})
            for x in problem.tensors()[1:]:
                back = problem._narrow(x).double() * decode.NARROW[cache][1]
                assert torch.equal(back, x.double()) and len(x.unique()) > 30


def test_bars():
    """Each bound finds the rows of its cells; a cell that was not measured has none."""
    problems = bars.problems(DecodeProblem)
    assert len({*problems}) == len(problems) > 20
    rows = [
        problem.row(impl=impl, ms=1.0, gbps=100.0)
        for problem in problems
        for impl in ("cupyflash", "sdpa-cudnn")
    ]
    assert bars.table(rows, 100.0).row_count == len(bars.LARGE) + len(bars.BARS)
    assert 0 < bars.table(rows[:30], 100.0).row_count < len(bars.LARGE) + len(bars.BARS)


def test_cells_begin_in_time(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert [*decode.in_time(range(100), 5)] == [0, 1, 2, 3]
