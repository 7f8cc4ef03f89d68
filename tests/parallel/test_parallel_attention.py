"""Attention over the tokens of several processes, beside float64 and beside one process.

The processes are those of ranks.py.
"""

import calls
import pytest
import torch
from targets import few

import cupyflash
from cupyflash.ops.attention.options import NO_EXTRAS
from cupyflash.parallel import pieces
from cupyflash.parallel.choice import LEAST_BYTES, choose, heads_at_once, heads_bytes, heads_divide
from cupyflash.parallel.exchange import calls as calls_of
from cupyflash.parallel.exchange import exchange
from cupyflash.parallel.tokens import Band, Tokens
from cupyflash.testing import expected

OPTIONS = [
    {},
    {"causal": True},
    {"causal": "top-left", "window": (11, None)},
    {"window": (7, 3)},
    {"window": (None, 3), "scale": 0.3},
    {"window": (6, None), "softcap": 5.0},
    {"causal": True, "alibi": 2, "sinks": True},
    {"causal": True, "alibi": 1, "window": (9, None), "deterministic": True},
    {"sinks": True},
    {"alibi": 2, "dropout_seed": 3},  # which drops nothing
    {"alibi": 1, "window": (5, 12), "sinks": True, "softcap": 4.0},
]
WHOLE = {"alibi": 1, "window": (30, 30)}
LENGTHS = ([64], [37, 5, 90, 0, 1], [1, 1, 1], [97], [0])
DTYPES = ("float32", "bfloat16", "float16")
HEADS = ((4, 4), (8, 2), (4, 1))


def cases():
    """((lengths, dtype, heads, head_dim, options), zigzag, least_bytes), two for each option."""
    for i, options in enumerate(OPTIONS * 2):
        arguments = (LENGTHS[i % 5], DTYPES[i // 2 % 3], HEADS[i % 3], 16, options)
        yield arguments, i % 4 > 0, (1, LEAST_BYTES)[i // 3 % 2]


@pytest.mark.parametrize("size", ["two", "four"])
def test_forward_and_backward(size, request):
    """Every option with every move; with four ranks, also two by two.

    Without a GPU each of the two cases of an option has half of the moves of four ranks.
    """
    ranks, moves = request.getfixturevalue(size), ["heads", "keys"]
    if size == "four":
        moves += [(2, 2), (4, 1)]
    step = 2 if few() and size == "four" else 1
    for number, (arguments, *others) in enumerate(cases()):
        inputs, options = calls.problem(*arguments)
        options.pop("deterministic", None)  # the reference always is
        right = expected(inputs, **options)
        for move in moves[number % step :: step]:
            results = ranks.run(calls.forward_backward, arguments, move, *others)
            right.check(**calls.whole(results, sum(arguments[0])))


@pytest.mark.parametrize("lengths", [[64], [37, 5, 90, 0, 1]], ids=str)
def test_heads_have_the_bits_of_one_process(lengths, two):
    arguments = (lengths, "float32", (8, 2), 16, WHOLE)
    inputs, options = calls.problem(*arguments)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    if len(lengths) == 1:
        out = cupyflash.attention(*(x[None] for x in leaves), **options)[0]
    else:
        ends, longest = inputs.cu_seqlens_q, max(lengths)
        options["window_size"] = options.pop("window")
        out = cupyflash.flash_attn_varlen_func(*leaves, ends, ends, longest, longest, **options)
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    found = calls.whole(two.run(calls.forward_backward, arguments, "heads"), sum(lengths))
    for name, x in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize("lengths", [[64], [37, 5, 90, 0, 1]], ids=str)
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((4, 2), {"causal": True, "alibi": 2}),
        ((8, 8), {"window": (21, 3), "alibi": 1}),
        ((8, 4), {"causal": True, "window": (21, None), "sinks": True}),
        ((4, 4), {"softcap": 3.0}),
    ],
    ids=str,
)
def test_dropout_drops_what_one_process_does(heads, options, lengths, two, four):
    """The rows of ranks begin anywhere; also on a mesh, one of whose axes may have one rank."""
    options = options | {"dropout_p": 0.3, "dropout_seed": 11}
    arguments = (lengths, "float32", heads, 16, options)
    inputs, arrays = calls.problem(*arguments)
    right = expected(inputs, **arrays)
    moves = [(two, x) for x in ("heads", "auto", "keys")]
    moves += [(four, x) for x in ("heads", "keys", (1, 4), (2, 2), (4, 1))]
    for number, (ranks, move) in enumerate(moves):
        least_bytes = (LEAST_BYTES, 1)[number % 2]
        results = ranks.run(calls.forward_backward, arguments, move, True, least_bytes)
        right.check(**calls.whole(results, sum(lengths)))


def test_key_heads_for_several_ranks(four):
    """Four ranks and one key head: its gradient is the sum of theirs."""
    arguments = ([33, 8], "float32", (4, 1), 16, {"causal": True})
    inputs, options = calls.problem(*arguments)
    results = four.run(calls.forward_backward, arguments, "heads")
    expected(inputs, **options).check(**calls.whole(results, 41))


@pytest.mark.parametrize(
    ("options", "band"),
    [({"causal": True}, Band(None, 0)), ({"window": (9, 4)}, Band(9, 4)), ({}, Band())],
    ids=str,
)
def test_eight_ranks_in_one_process(options, band):
    """The same code, with the keys of lists in the place of a collective."""
    lengths, ranks = [150, 3, 61], 8
    inputs, _ = calls.problem(lengths, "float32", (4, 2), 16, {})
    tokens = Tokens.of(lengths, ranks)
    keys = torch.cat([inputs.k, inputs.v], dim=2)
    results, sums = [], torch.zeros_like(keys)
    for rank in range(ranks):
        index, plan = torch.from_numpy(tokens.index(rank)), exchange(tokens, rank, band)
        numbers = torch.from_numpy(plan.numbers)
        arrived = keys[numbers.clamp(min=0)]
        arrived[numbers < 0] = torch.nan  # nobody reads padding
        made = calls_of(tokens, rank, band)
        rows = [torch.from_numpy(plan.rows_of(x.keys)) for x in made]
        pairs = [arrived[x].split(16, dim=2) for x in rows]
        device_calls = [pieces.DeviceCall.of(x, keys.device) for x in made]
        q, dout = inputs.q[index], inputs.dout[index]
        out, lse = pieces.forward(device_calls, q, pairs, {}, NO_EXTRAS)
        dq, found, _ = pieces.backward(device_calls, dout, q, pairs, out, lse, None, {}, NO_EXTRAS)
        for some, gradients in zip(rows, found, strict=True):
            sums.index_add_(0, numbers[some], torch.cat(gradients, dim=2))
        results.append((index, {"out": out, "lse": lse.t(), "dq": dq}))
    dk, dv = sums.split(16, dim=2)
    right = expected(inputs, **options)
    right.check(**calls.whole(results, sum(lengths)), dk=dk, dv=dv)


@pytest.mark.parametrize("move", ["heads", "keys"])
def test_ways_of_torch(move, two):
    """Checkpoints, torch.compile, strided inputs, no gradient, autocast, the gradient of an LSE."""
    for found in two.run(calls.ways, move):
        assert [way for way, same in found.items() if not same] == []


@pytest.mark.parametrize("move", ["heads", "keys"])
def test_training_after_inference(move, two):
    assert two.run(calls.after_inference, move) == [True, True]


def test_sharded_tensors(two, four):
    """DTensors, of a mesh of one axis and of two."""
    for ranks, move in ((two, "auto"), (four, (2, 2))):
        for same, texts in ranks.run(calls.of_sharded, move):
            assert same
            assert "must all be DTensors, or none" in texts[0] and "must be Shard(0)" in texts[1]
            uneven = "must have [3, 2, 3, 2] tokens on its ranks, as torch has, got [3, 3, 2, 2]"
            assert [uneven in text for text in texts[2:]] == [True] * (move != "auto")


def test_take_and_gather(two, four):
    for ranks in (two, four):
        for lengths in LENGTHS:
            assert all(ranks.run(calls.taken_and_gathered, lengths, "heads"))
    assert all(four.run(calls.taken_and_gathered, [37, 5, 90, 0, 1], (2, 2)))


def test_memory_of_destroyed_groups(two):
    assert two.run(calls.forgotten) == [[False, True]] * 2


@pytest.mark.parametrize(("heads", "move"), [((8, 2), "heads"), ((8, 4), "heads")])
def test_bytes_of_heads(heads, move, four):
    """As the formula says, with fewer key heads than ranks, too."""
    assert heads_divide(4, *heads)
    for sent in four.run(calls.bytes_sent, heads, move):
        assert sent == 16 * heads_bytes(4, heads, (16, 16), 4)


@pytest.mark.parametrize(
    ("ranks", "heads", "others", "move"),
    [
        (2, (32, 8), {}, "keys"),
        (8, (64, 8), {}, "keys"),
        (8, (32, 32), {}, "heads"),
        (64, (64, 8), {}, "heads"),
        (64, (64, 8), {"share": 0.02}, "keys"),  # a window
        (6, (32, 8), {}, "keys"),  # which six ranks cannot divide
        (2, (32, 8), {"prefers_heads": True}, "heads"),
    ],
)
def test_auto_takes_fewer_bytes(ranks, heads, others, move):
    assert choose(ranks, heads, (128, 128), 2, **others) == move


def test_heads_at_once():
    """One launch for few keys, and one key head at a time for many."""
    dims, tokens = ((128, 128), 2, 256 << 20), (1024, 2**17, 2**18, 2**19, 2**20)
    assert [heads_at_once(n, 8, *dims) for n in tokens] == [8, 4, 2, 1, 1]
    assert heads_at_once(0, 8, *dims) == 8 and heads_at_once(4, 0, *dims) == 1
