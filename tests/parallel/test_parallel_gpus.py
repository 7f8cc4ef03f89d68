"""Two GPUs, by NCCL: results beside float64, and equal bits in every run."""

import itertools

import calls
import pytest
import texts
import torch
from ranks import Ranks

from cupyflash.testing import expected

RUNS = 50
LENGTHS = [1000, 37, 5, 2100]
BY = ("engines", "kernel", "collectives")


@pytest.fixture(scope="module")
def gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with Ranks(2, backend="nccl") as ranks:
        yield ranks


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window": (100, 0), "sinks": True},
        {"window": (70, 30)},
        {"causal": True, "softcap": 5.0, "alibi": 2},
        {"window": (70, 30), "softcap": 5.0, "alibi": 1},
        {"causal": True, "dropout_p": 0.3, "dropout_seed": 11},
        {"window": (90, 7), "alibi": 2, "sinks": True, "dropout_p": 0.3, "dropout_seed": 5},
        {},
    ],
    ids=str,
)
def test_forward_and_backward(options, dtype, gpus):
    arguments = (LENGTHS, dtype, (8, 2), 64, options)
    inputs, arrays = calls.problem(*arguments)
    right = expected(inputs, **arrays)
    ways = [("heads", 1), ("keys", 1), ("keys", 2**30)]
    for by, (move, least_bytes) in itertools.product(BY, ways):
        results = gpus.run(calls.forward_backward, arguments, move, True, least_bytes, by)
        right.check(**calls.whole(results, sum(LENGTHS)))


@pytest.mark.parametrize("name", texts.TEXTS)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (70, 30)}, {}], ids=str)
def test_scores(options, name, gpus):
    lengths = [300, 37, 5, 400]
    arguments = (lengths, "bfloat16", (8, 4), 64, options)
    right = texts.expected(arguments, name)
    for move, least_bytes in (("heads", 1), ("keys", 1), ("keys", 2**30)):
        results = gpus.run(texts.forward_backward, arguments, name, move, least_bytes)
        right.check(**calls.whole(results, sum(lengths)))


@pytest.mark.parametrize("move", ["heads", "keys"])
def test_kernel_has_the_bits_of_engines(move, gpus):
    options = {"causal": True, "deterministic": True, "window": (300, 0)}
    arguments = (LENGTHS, "bfloat16", (8, 4), 64, options)
    found = []
    for by in ("engines", "kernel"):
        results = gpus.run(calls.forward_backward, arguments, move, True, 1, by)
        found.append(calls.whole(results, sum(LENGTHS)))
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("move", ["heads", "keys"])
def test_equal_bits(move, by, gpus):
    """Groups of one key head, whose transport and computation overlap in other ways each time."""
    options = {"causal": True, "deterministic": True}
    arguments = (LENGTHS, "bfloat16", (8, 4), 64, options)
    more = arguments, move, True, 1, by
    runs = (gpus.run(calls.delayed, number, *more) for number in range(RUNS))
    first, *others = (calls.whole(results, sum(LENGTHS)) for results in runs)
    for found in others:
        assert all(torch.equal(x, first[name]) for name, x in found.items())
