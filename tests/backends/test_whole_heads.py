"""Backward passes whose blocks take all keys of a head, one tile after the other."""

import math
import sys

import pytest
from matrix import each
from passes import forward_backward
from problems import HOPPER, problem_of, view

from cupyflash.ops.attention.sm90.backward import backward_kernels, takes_heads
from cupyflash.testing import expected, poison_free_memory, to_float64

RULES = sys.modules["cupyflash.ops.attention.sm90.backward"]


def taken_heads(heads, queries, keys, causal=False, window=None, shares=1, **features):
    """Whether blocks take whole heads of head dim 64."""
    problem = problem_of(1, (heads, heads), queries, keys, 64, causal, window)
    kind = problem.kind(HOPPER.capability)
    kind = kind._replace(features=kind.features._replace(**features))
    return takes_heads(backward_kernels(kind)[1], problem, HOPPER, shares)


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "causal", "taken"),
    [
        (1024, 512, 512, False, True),
        (1024, 512, 512, True, True),
        (512, 1024, 1024, False, False),  # the rows of 132 heads do not fit the L2 cache
        (512, 1024, 1024, True, True),  # they are read half as often
        (150, 512, 512, False, False),  # the last 18 heads alone take as long as the 132 before
        (2, 4096, 77, False, True),  # one tile of keys
        (2, 4096, 129, False, False),  # two
        (1024, 300, 256, False, True),
        (1024, 300, 256, True, False),  # the first 44 queries see no key
    ],
)
def test_which_take_heads(heads, queries, keys, causal, taken):
    assert taken_heads(heads, queries, keys, causal) == taken


def without_limits(monkeypatch):
    """Heads are taken wherever that is possible, whether it is faster or not."""
    for limit in ("SAVED_KEYS", "HEADS_L2_FRACTION"):
        monkeypatch.setattr(RULES, limit, math.inf)


def test_which_cannot(monkeypatch):
    shape = 1024, 256, 256
    assert taken_heads(*shape)
    for option in ({"dropout": True}, {"alibi": True}, {"softcap": True}, {"bias": 1}):
        assert not taken_heads(*shape, **option)
    lengths = problem_of(1, (1024, 1024), 256, 256, 64, seqused_k=view(1, dtype="int32"))
    main = backward_kernels(lengths.kind(HOPPER.capability))[1]
    assert not takes_heads(main, lengths, HOPPER, 1)
    # Shares of the rows of a head, which differ from key tile to key tile under a mask.
    shape = 8, 4096, 4100
    without_limits(monkeypatch)
    assert taken_heads(*shape, shares=4)
    assert taken_heads(*shape, causal=True)
    assert not taken_heads(*shape, causal=True, shares=4)
    # The last query must see the first key, and the first one, too.
    shape = 1024, 200, 330
    for window, taken in (((329, 0), True), ((328, 0), False), ((None, 0), True)):
        assert taken_heads(*shape, window=window) == taken
    shape = 1024, 330, 200
    for window, taken in (((None, 130), True), ((None, 129), False)):
        assert taken_heads(*shape, window=window) == taken


@pytest.fixture
def taking_heads(monkeypatch):
    """Every problem that can; the list of what was decided."""
    without_limits(monkeypatch)
    decided = []

    def decide(*arguments):
        decided.append(takes_heads(*arguments))
        return decided[-1]

    monkeypatch.setattr(RULES, "takes_heads", decide)
    return decided


# Lengths that no other test has, so that each has a plan of its own.
CASES = [
    ({}, {}),
    ({}, {"causal": True}),
    ({"seqlen_q": 323, "seqlen_k": 77}, {}),  # one tile of keys
    ({"seqlen_q": 71, "seqlen_k": 683}, {}),  # one tile of queries
    ({"seqlen_q": 71, "seqlen_k": 683}, {"causal": True}),
    ({"seqlen_q": 323, "seqlen_k": 683}, {"causal": "top-left"}),  # keys that nobody sees
    ({"seqlen_q": 683, "seqlen_k": 323}, {"causal": "top-left"}),
    ({"seqlen_q": 323, "seqlen_k": 341}, {"window": (None, 70)}),
    ({"seqlen_q": 359, "seqlen_k": 323}, {"window": (None, 70)}),
    ({"seqlen_q": 1, "seqlen_k": 1}, {}),
    ({"heads_q": 6, "heads_kv": 2}, {"causal": True}),  # several query heads in a block
    ({"batch": 1, "heads_q": 8, "heads_kv": 1, "seqlen_k": 323}, {}),  # shares of a group
    ({"batch": 1, "seqlen_q": 3100, "seqlen_k": 131}, {}),  # shares of the rows of a head
    ({"storage": "padded"}, {"causal": True}),
    ({"layout": "bhsd"}, {}),
    ({"batch": 9, "heads_q": 17, "seqlen_q": 203, "seqlen_k": 205}, {"causal": True}),  # 153 heads
]


@each(device="cuda")
@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 96, 128])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_taking_heads(target, taking_heads, number, head_dim):
    """The gradients are right, and have the same bits in every run, deterministic or not."""
    shape, options = CASES[number]
    shape = {"batch": 2, "seqlen_q": 323, "seqlen_k": 347, "heads_q": 3} | shape
    dtype = target.dtypes[(number + head_dim // 8) % len(target.dtypes)]
    inputs = target.inputs(dtype, head_dim=head_dim, **shape)
    poison_free_memory(target.library, target.device, [x.nbytes for x in (inputs.q, inputs.k)] * 4)
    results = forward_backward(inputs, **options)
    expected(inputs, **options).check(**results)
    if not any(taking_heads):  # another backend
        return
    for deterministic in (False, True):
        again = forward_backward(inputs, deterministic=deterministic, **options)
        for name in ("dq", "dk", "dv"):
            assert (to_float64(results[name]) == to_float64(again[name])).all(), name
    assert all(taking_heads)
