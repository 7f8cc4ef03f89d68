"""Scores and masks of the caller's own over the tokens of several processes."""

import dataclasses

import calls
import pytest
import texts
import torch
from matrix import each

from cupyflash import Score
from cupyflash.ops.attention.options import NO_EXTRAS
from cupyflash.ops.attention.score_text import Text
from cupyflash.ops.attention.score_text.arguments import learning
from cupyflash.parallel.choice import LEAST_BYTES
from cupyflash.parallel.texts import CallText, text_of
from cupyflash.parallel.tokens import Band
from cupyflash.testing import expected

PLACES = frozenset(("batch", "head", "query", "key"))
ENDS = ("cu_seqlens_q", "cu_seqlens_k")
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
    right = expected(inputs, dlse=texts.dlse_of(arguments), **arrays)
    moves = [(two, x) for x in ("heads", "keys")]
    moves += [(four, x) for x in ("heads", "keys", (1, 4), (2, 2))]
    for ranks, move in moves:
        results = ranks.run(texts.forward_backward, arguments, "alibi", move)
        right.check(**calls.whole(results, sum(lengths)))


@pytest.mark.parametrize("move", ["heads", "keys"])
def test_ways_of_torch(move, two):
    for found in two.run(texts.ways, move):
        assert found == dict.fromkeys(("checkpoint", "compiled"), True)


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
    text = learning(text, [x.dtype == "float32" for x in text.captures])
    given = NO_EXTRAS, CallText(text, captures, PLACES, 0, 4)
    found = texts.in_one_process(inputs, lengths, ranks, band, {}, *given)
    found["d0"] = found.pop("dtable")
    texts.expected(arguments, "both").check(**found)


@pytest.mark.parametrize("score", ["score - slopes(head) * abs(query - key)", ""])
@each(library="torch")
def test_dropout_of_pieces(target, score):
    """Four ranks on each backend: ALiBi by a score or by the option, in a window, with dropout."""
    lengths, slopes = [333, 70, 200], torch.linspace(0.02, 0.2, 4, device=target.device)
    options = {"dropout_p": 0.25, "deterministic": True}
    text, captures = Text("", "", ()), ()
    if score:
        text, captures = Score(score, slopes=slopes).alone, (slopes,)
    text = CallText(text._replace(drops=True), captures, PLACES, 0, 4)
    extras = NO_EXTRAS._replace(dropout_seed=torch.tensor([7], device=target.device))
    extras = extras if score else extras._replace(alibi_slopes=slopes)
    for dtype in target.dtypes:
        inputs = target.varlen_inputs(dtype, lengths, heads_q=4, heads_kv=2, head_dim=64)
        found = texts.in_one_process(inputs, lengths, 4, Band(90, 0, 16), options, extras, text)
        of_host = {x: getattr(inputs, x).cpu() for x in ("q", "k", "v", "dout", *ENDS)}
        host = dataclasses.replace(inputs, **of_host)
        right = expected(
            host, causal=True, window=(90, None), dropout_p=0.25, dropout_seed=7,
            alibi_slopes=slopes.cpu(),
        )  # fmt: skip
        right.check(**found)
