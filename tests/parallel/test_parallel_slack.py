"""Shards with slack: sequences that stay whole on one of several processes, those of ranks.py."""

import calls
import numpy
import pytest
import slack as whole
import texts

from cupyflash.parallel.tokens import Tokens
from cupyflash.testing import expected

# Lengths of which none are divided, the longest is, and that leave ranks without tokens; slacks.
DIVISIONS = [([30, 31, 0, 28, 5, 29, 1], 0.6), ([11, 5, 90, 12, 0, 13], 0.5), ([19, 4], 4.0)]
OPTIONS = [
    {"causal": True, "deterministic": True},
    {"window": (7, 3), "sinks": True},
    {"causal": True, "alibi": 2, "sinks": True},
    {"alibi": 1, "softcap": 5.0},
    {"causal": True, "dropout_p": 0.3, "dropout_seed": 11},
    {"alibi": 2, "window": (20, 7), "dropout_p": 0.3, "dropout_seed": 5},
]


def cases(options):
    """(options, lengths, slack, dtype, heads), each of the options with all divisions."""
    for i, some in enumerate(options):
        for j, (lengths, slack) in enumerate(DIVISIONS):
            dtype = "float32" if i > 3 or j else "bfloat16"
            yield some, lengths, slack, dtype, ((4, 4), (8, 4))[(i + j) % 2]


def check(ranks, size, lengths, slack, right, name, arguments):
    """All moves, whose keys travel only where a sequence is divided."""
    moves = ["auto", "keys", "heads"] + [(2, 2)] * (size == 4)
    for move in moves:
        team = move[1] if isinstance(move, tuple) else 1
        tokens = Tokens.of(lengths, size, slack=slack, team=team).teams(team)
        travel = not tokens.apart
        assert travel == (max(lengths) == 90)
        results = ranks.run(whole.forward_backward, name, arguments, move, travel, slack)
        right.check(**calls.whole(results, sum(lengths)))


@pytest.mark.parametrize("size", ["two", "four"])
def test_forward_and_backward(size, request):
    ranks, count = request.getfixturevalue(size), {"two": 2, "four": 4}[size]
    for options, lengths, slack, dtype, heads in cases(OPTIONS):
        arguments = (lengths, dtype, heads, 16, options)
        inputs, arrays = calls.problem(*arguments)
        arrays.pop("deterministic", None)  # the reference always is
        check(ranks, count, lengths, slack, expected(inputs, **arrays), "", arguments)


@pytest.mark.parametrize("size", ["two", "four"])
def test_scores_and_masks(size, request):
    """They see the number of a sequence among all, and gradients add up."""
    ranks, count = request.getfixturevalue(size), {"two": 2, "four": 4}[size]
    for number, name in enumerate(texts.TEXTS):
        lengths, slack = DIVISIONS[number % 2]
        lengths = [n for n in lengths if n]
        arguments = (lengths, "float32", (4, 4), 16, {"causal": number % 2 == 0})
        check(ranks, count, lengths, slack, texts.expected(arguments, name), name, arguments)


def test_later_calls_are_those_of_one_gpu(two):
    """Unless ranks compare them, or they need more; the last rank has no tokens, too."""
    for lengths, slack in (DIVISIONS[0], ([30], 4.0)):
        for found, text in two.run(whole.repeated, lengths, slack):
            assert [what for what, is_so in found.items() if not is_so] == []
            assert len(found) == 14
            assert text == "parallel.attention: k must be float32 like q, got float16"


def test_take_and_gather(two, four):
    for ranks in (two, four):
        for lengths, slack in DIVISIONS:
            assert all(ranks.run(calls.taken_and_gathered, lengths, "heads", slack))
    assert all(four.run(calls.taken_and_gathered, DIVISIONS[0][0], (2, 2), 0.6))


def test_rows_are_divided_alike():
    tokens = Tokens.of([30, 8, 25], 2, slack=0.3)
    assert tokens.apart and tokens.of_rows(3).apart
    assert numpy.array_equal(tokens.of_rows(3).counts, 3 * tokens.counts)


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf"), "0.1", True])
def test_slacks_that_are_refused(wrong, two):
    for text in two.run(whole.refused, wrong):
        assert text.startswith("parallel.Shard: slack must be ") and "got" in text


def test_another_slack_on_another_rank(two):
    for text in two.run(whole.another):
        assert "all ranks must have the same" in text and "slack 0.5" in text
