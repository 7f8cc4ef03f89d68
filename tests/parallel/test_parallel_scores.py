"""Scores and masks of the caller's own over the tokens of several processes."""

import calls
import pytest
import texts
import torch

from cupyflash.ops.attention.options import NO_EXTRAS
from cupyflash.ops.attention.score_text.arguments import learning
from cupyflash.parallel import pieces
from cupyflash.parallel.choice import LEAST_BYTES
from cupyflash.parallel.exchange import calls as calls_of
from cupyflash.parallel.texts import CallText, text_of
from cupyflash.parallel.tokens import Band, Tokens
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


@pytest.mark.parametrize(
    ("options", "band"),
    [({"causal": True}, Band(None, 0)), ({"window": (9, 4)}, Band(9, 4, 16)), ({}, Band())],
    ids=str,
)
def test_eight_ranks_in_one_process(options, band):
    """The same code without a collective, also of pieces that begin at multiples of 16."""
    lengths, ranks = [150, 3, 61], 8
    arguments = (lengths, "float32", (4, 2), 16, options)
    inputs, _ = calls.problem(*arguments)
    arrays = texts.arrays_of("both", lengths, 4)
    text, captures = text_of(*(x(*arrays) for x in texts.TEXTS["both"][:2]))
    learn = [x.dtype == "float32" for x in text.captures]
    names = frozenset(("batch", "head", "query", "key"))
    text = CallText(learning(text, learn), captures, names, 0, 4)
    tokens, results = Tokens.of(lengths, ranks), []
    sums = {"dk": torch.zeros_like(inputs.k), "dv": torch.zeros_like(inputs.v)}
    sums["d0"] = torch.zeros_like(arrays[0])
    for rank in range(ranks):
        index, made = torch.from_numpy(tokens.index(rank)), calls_of(tokens, rank, band)
        rows = [torch.from_numpy(x.keys) for x in made]
        pairs = [(inputs.k[x], inputs.v[x]) for x in rows]
        of_device = [pieces.DeviceCall.of(x, index.device) for x in made]
        q, dout = inputs.q[index], inputs.dout[index]
        out, lse = pieces.forward(of_device, q, pairs, {}, NO_EXTRAS, text)
        dq, found, (_, *of_text) = pieces.backward(
            of_device, dout, q, pairs, out, lse, None, {}, NO_EXTRAS, text
        )
        for some, pair in zip(rows, found, strict=True):
            for name, x in zip(("dk", "dv"), pair):
                sums[name].index_add_(0, some, x)
        sums["d0"] += of_text[learn.index(True)]
        results.append((index, {"out": out, "lse": lse.t(), "dq": dq}))
    right = texts.expected(arguments, "both")
    right.check(**calls.whole(results, sum(lengths)), **sums)
