"""Scores and masks of the caller's own over the tokens of several processes, those of ranks.py."""

import dataclasses
from pathlib import Path

import calls
import pytest
import texts
from emulator import COMPILER
from matrix import each
from places import run_script
from targets import few, parts_of_processes

from cupyflash.ops.attention.backends import BACKENDS
from cupyflash.parallel.choice import LEAST_BYTES
from cupyflash.parallel.tokens import Band
from cupyflash.testing import expected

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
    """Every text with every move; gradients of what it reads add up over the ranks.

    Without a GPU a text has half of the moves of four ranks.
    """
    ranks, moves = request.getfixturevalue(size), ["heads", "keys"]
    if size == "four":
        moves += [(1, 4), (2, 2), (4, 1)]
    step = 2 if few() and size == "four" else 1
    for number, (arguments, name) in enumerate(cases()):
        right = texts.expected(arguments, name)
        for move in moves[number % step :: step]:
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
def test_block_masks(move, two):
    for same, text in two.run(texts.block_masks, move):
        assert same
        assert text == (
            "parallel.attention: mask must be of the lengths (40, 40) of queries and keys, got a "
            "BlockMask of (40, 39)"
        )


@pytest.mark.parametrize("move", ["heads", "keys"])
def test_arrays_have_an_element_of_each_sequence_and_token(move, two):
    """Not one of each token of a rank."""
    for right, tokens, batches in two.run(texts.sizes, move):
        assert right == ""
        assert "axis 1 of table must have at least 20 elements" in tokens
        assert "axis 0 of table must have at least 4 elements" in batches


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
    arguments = ([150, 3, 61], "float32", (4, 2), 16, options)
    texts.expected(arguments, "both").check(**texts.with_both(arguments, 8, band))


@pytest.mark.parametrize("score", texts.SCORES)
@each(library="torch")
def test_dropout_of_pieces(target, score):
    """Four ranks in one process, on each backend."""
    lengths = [333, 70, 200]
    for dtype in target.dtypes:
        inputs = target.varlen_inputs(dtype, lengths, heads_q=4, heads_kv=2, head_dim=64)
        found = texts.with_dropout(inputs, lengths, 4, score)
        of_host = {x: getattr(inputs, x).cpu() for x in ("q", "k", "v", "dout", *ENDS)}
        texts.expected_with_dropout(dataclasses.replace(inputs, **of_host)).check(**found)


@pytest.mark.skipif(not COMPILER, reason="needs g++")
@pytest.mark.parametrize("backends", parts_of_processes(BACKENDS), ids="-".join)
def test_emulated_kernels(backends, emulated_kernels):
    """In a process that takes itself for one with a Hopper GPU."""
    program = Path(__file__).with_name("emulated_pieces.py")
    run_script(program, emulated_kernels, *backends, *few(), timeout=900)
