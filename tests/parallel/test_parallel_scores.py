"""Scores and masks of the caller's own over the tokens of several processes."""

import calls
import pytest
import texts

from cupyflash.parallel.choice import LEAST_BYTES
from cupyflash.testing import expected

LENGTHS = ([61], [37, 5, 70, 1])
OPTIONS = [{}, {"causal": True}, {"window": (9, 4)}, {"causal": True, "window": (12, 0)}]


def cases():
    """((lengths, dtype, heads, head_dim, options), text), each text with every options."""
    dtypes, heads = ("float32", "bfloat16"), ((4, 4), (8, 2))
    for i, name in enumerate(texts.TEXTS):
        for j, options in enumerate(OPTIONS):
            shape = (LENGTHS[(i + j) % 2], dtypes[(i + j) // 2 % 2], heads[i % 2], 16, options)
            yield shape, name


@pytest.mark.parametrize("size", ["two", "four"])
def test_forward_and_backward(size, request):
    """Every text with every move; gradients of what it reads add up over the ranks."""
    ranks, moves = request.getfixturevalue(size), ["heads", "keys"]
    if size == "four":
        moves += [(1, 4), (2, 2), (4, 1)]
    for number, (arguments, name) in enumerate(cases()):
        right = texts.expected(arguments, name)
        for move in moves:
            least = (1, LEAST_BYTES)[number // 2 % 2]
            results = ranks.run(texts.forward_backward, arguments, name, move, least)
            right.check(**calls.whole(results, sum(arguments[0])))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_beside_other_options(lengths, two, four):
    """A text that stands for ALiBi, with sinks, and dropout of what one process drops."""
    options = {"alibi": 2, "sinks": True, "dropout_p": 0.3, "dropout_seed": 11, "window": (20, 7)}
    arguments = (lengths, "float32", (8, 4), 16, options)
    inputs, arrays = calls.problem(*arguments)
    right = expected(inputs, **arrays)
    moves = [(two, x) for x in ("heads", "keys")]
    moves += [(four, x) for x in ("heads", "keys", (1, 4), (2, 2))]
    for ranks, move in moves:
        results = ranks.run(texts.forward_backward, arguments, "alibi", move)
        right.check(**calls.whole(results, sum(lengths)))
