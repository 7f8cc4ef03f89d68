"""The division of tokens among 1 to 1024 ranks, and what travels between them, in one process."""

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies

from cupyflash.parallel import choice
from cupyflash.parallel.choice import keys_bytes
from cupyflash.parallel.exchange import calls, exchange, share
from cupyflash.parallel.gathered import GatheredKeys
from cupyflash.parallel.tokens import Band, Tokens, ranges
from cupyflash.parallel.transport import Team

TILE = 128  # rows of queries of a tile
RANKS = (1, 2, 3, 8, 1024)
LENGTHS = {
    "one": [4096],
    "odd": [4099],
    "one token": [1],
    "nothing": [],
    "empty ones": [0, 0],
    "short": [37, 5, 0, 90, 1, 1],
    "many": numpy.random.default_rng(0).integers(1, 2000, 20).tolist(),
    "tokens": [1] * 50,
}
BANDS = {
    "full": Band(),
    "causal": Band(None, 0),
    "window": Band(20, 0),
    "both sides": Band(7, 3),
    "right": Band(None, 2),
}


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_token_once(lengths, ranks, zigzag):
    tokens = Tokens.of(lengths, ranks, zigzag)
    indices = [tokens.index(rank) for rank in range(ranks)]
    assert numpy.array_equal(numpy.sort(numpy.concatenate(indices)), numpy.arange(sum(lengths)))
    assert [len(x) for x in indices] == tokens.counts.tolist()
    assert tokens.counts.max() - tokens.counts.min() <= 1
    assert all((numpy.diff(x) > 0).all() for x in indices)
    positions = numpy.concatenate([numpy.arange(n) for n in lengths] or [numpy.arange(0)])
    for rank in range(0, ranks, max(1, ranks // 4)):
        assert numpy.array_equal(tokens.positions(rank), positions[indices[rank]])


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("ranks", RANKS)
def test_work_is_even(lengths, ranks):
    """Of causal attention, within a tile of queries that sees the longest sequence."""
    tokens = Tokens.of(lengths, ranks)
    work = [tokens.work(rank, BANDS["causal"]) for rank in range(ranks)]
    assert sum(work) == sum(n * (n + 1) // 2 for n in lengths)
    assert max(work) - min(work) <= TILE * max(lengths, default=0)
    if ranks > 1 and max(lengths, default=0) > 4 * ranks:
        one = Tokens.of(lengths, ranks, zigzag=False)
        uneven = [one.work(rank, BANDS["causal"]) for rank in range(ranks)]
        assert max(uneven) - min(uneven) > 2 * (max(work) - min(work))


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_work_counts_the_keys_that_are_seen(band):
    lengths = [9, 0, 30, 4]
    seen = [
        (band.left is None or i - j <= band.left) and (band.right is None or j - i <= band.right)
        for n in lengths
        for i in range(n)
        for j in range(n)
    ]
    for zigzag in (True, False):
        tokens = Tokens.of(lengths, 3, zigzag)
        assert sum(tokens.work(rank, band) for rank in range(3)) == sum(seen)


@pytest.mark.parametrize("zigzag", [True, False])
def test_a_team_has_the_tokens_of_its_ranks(zigzag):
    tokens = Tokens.of([97, 3, 64, 10], 8, zigzag)
    teams = tokens.teams(4)
    assert teams.ranks == 2
    for team in range(2):
        indices = [tokens.index(4 * team + rank) for rank in range(4)]
        assert numpy.array_equal(numpy.sort(numpy.concatenate(indices)), teams.index(team))


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("name", ["odd", "short", "many", "nothing", "one token"])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_keys_arrive(name, ranks, band, zigzag):
    """Tokens stand for their keys: every query meets those that it sees, in their order."""
    check_keys(Tokens.of(LENGTHS[name], ranks, zigzag), band)


def check_keys(tokens, band):
    """Every query of every rank meets the keys that it sees, in their order."""
    ranks = tokens.ranks
    plans = [exchange(tokens, rank, band) for rank in range(ranks)]
    for rank, arrived in enumerate(travelled(tokens, plans)):
        rows = [numpy.arange(0)]
        for call in calls(tokens, rank, band):
            every = numpy.arange(len(tokens.index(rank)))
            queries = tokens.index(rank)[every if call.queries is None else call.queries]
            keys = arrived[plans[rank].rows_of(call.keys)]
            rows.append(queries)
            for i, sequence in enumerate(call.sequences):
                some = queries[call.cu_seqlens_q[i] : call.cu_seqlens_q[i + 1]]
                met = keys[call.cu_seqlens_k[i] : call.cu_seqlens_k[i + 1]]
                check_window(tokens, sequence, some, met, call.window, band)
            assert call.longest == tuple(
                int(numpy.diff(x).max()) for x in (call.cu_seqlens_q, call.cu_seqlens_k)
            )
        assert numpy.array_equal(numpy.sort(numpy.concatenate(rows)), tokens.index(rank))


@pytest.mark.parametrize("band", [Band(20, 0, 16), Band(7, 3, 16), Band(None, None, 16)], ids=str)
@pytest.mark.parametrize("name", ["odd", "short", "many", "nothing"])
def test_pieces_begin_at_steps(name, band):
    """Rows in front of a piece make it so, and stand for nothing; windows stay as they are."""
    tokens = Tokens.of(LENGTHS[name], 3)
    for rank in range(3):
        plain = calls(tokens, rank, band._replace(step=1))
        for call, without in zip(calls(tokens, rank, band), plain, strict=True):
            assert (call.places[:2] % 16 == 0).all()
            every = numpy.arange(len(tokens.index(rank)))
            queries = every if call.queries is None else call.queries
            wanted = every if without.queries is None else without.queries
            assert numpy.array_equal(queries[queries >= 0], wanted)
            assert call.window == without.window
            positions = ranges(call.places[0], call.places[0] + numpy.diff(call.cu_seqlens_q))
            found = positions[queries >= 0]
            assert numpy.array_equal(found, tokens.positions(rank)[wanted])
            ends = [x.places[1] + numpy.diff(x.cu_seqlens_k) for x in (call, without)]
            assert numpy.array_equal(*ends)


def check_window(tokens, sequence, queries, keys, window, band):
    """Each query of a piece sees, by the window of the call, the keys of its band."""
    first, length = tokens.starts[sequence], tokens.lengths[sequence]
    left, right = window or (None, None)
    for row in (0, len(queries) - 1):
        position = queries[row] - first
        begin = 0 if band.left is None else max(0, position - band.left)
        end = length if band.right is None else min(length, position + band.right + 1)
        diagonal = row + len(keys) - len(queries)
        low = 0 if left is None else max(0, diagonal - left)
        high = len(keys) if right is None else min(len(keys), diagonal + right + 1)
        assert keys[low:high].tolist() == list(range(first + begin, first + end))


def travelled(tokens, plans):
    """The numbers that arrive at each rank when all send the tokens that they hold."""
    ranks = tokens.ranks
    if plans[0].everything:
        padded = []
        for rank, plan in enumerate(plans):
            rows = numpy.full(plan.rows, -1)
            rows[: len(plan.send)] = tokens.index(rank)[plan.send]
            padded.append(rows)
        return [numpy.concatenate(padded)] * ranks
    sent = [
        numpy.split(tokens.index(rank)[plan.send], numpy.cumsum(plan.send_counts)[:-1])
        for rank, plan in enumerate(plans)
    ]
    for rank, plan in enumerate(plans):
        assert plan.receive_counts == [len(sent[other][rank]) for other in range(ranks)]
    return [numpy.concatenate([sent[other][rank] for other in range(ranks)])
            for rank in range(ranks)]  # fmt: skip


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("slack", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_ranks_have_the_mean_and_the_slack(lengths, ranks, slack, zigzag):
    """Of tokens and of pairs; the longest sequences alone are divided."""
    tokens, even = Tokens.of(lengths, ranks, zigzag, slack=slack), Tokens.of(lengths, ranks, zigzag)
    indices = [tokens.index(rank) for rank in range(ranks)]
    assert numpy.array_equal(numpy.sort(numpy.concatenate(indices)), numpy.arange(sum(lengths)))
    assert [len(x) for x in indices] == tokens.counts.tolist()
    on = numpy.count_nonzero(tokens.sizes, axis=1)
    whole, divided = tokens.lengths[on == 1], tokens.lengths[on > 1]
    assert min(divided, default=0) >= max(whole[whole > 1], default=0) or not len(divided)
    assert tokens.apart == (not len(divided))
    if numpy.array_equal(tokens.cuts, even.cuts):
        return  # all are divided
    assert ranks * tokens.counts.max() <= (1 + slack) * sum(lengths)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    if zigzag:
        work = [tokens.work(rank, BANDS["causal"]) for rank in range(ranks)]
        assert ranks * max(work) <= (1 + slack) * pairs + ranks * TILE * max(lengths)


@pytest.mark.parametrize(
    ("lengths", "ranks", "slack", "divided"),
    [
        ([64, 64, 32, 32, 16, 16, 8, 8, 4, 4, 4, 4], 2, 0.01, 0),  # of bench parallel
        ([64, 64, 32, 32, 16, 16, 8, 8, 4, 4, 4, 4], 4, 0.02, 6),
        ([64, 64, 32, 32, 16, 16, 8, 8, 4, 4, 4, 4], 4, 0.05, 4),
        ([64, 64, 32, 32, 16, 16, 8, 8, 4, 4, 4, 4], 4, 0.15, 2),
        ([64, 64, 32, 32, 16, 16, 8, 8, 4, 4, 4, 4], 4, 0.5, 0),
        ([900, 10, 10, 10, 10], 2, 0.05, 1),
        ([10, 10, 10, 10, 900], 2, 0.05, 1),
        ([50, 50, 50], 2, 0.1, 1),
        ([50, 50], 3, 0.1, 2),
        ([50, 50], 3, 0.6, 0),
        ([50, 0, 50], 2, 1e-9, 0),
        ([7], 4, 3.0, 0),
    ],
    ids=str,
)
def test_the_fewest_are_divided(lengths, ranks, slack, divided):
    tokens = Tokens.of(lengths, ranks, slack=slack)
    assert numpy.count_nonzero(numpy.count_nonzero(tokens.sizes, axis=1) > 1) == divided


def test_without_slack_all_are_divided():
    tokens = Tokens.of([8, 8, 8, 8], 2)
    assert tokens.sizes.tolist() == [[4, 4]] * 4 and not tokens.apart


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(
    lengths=strategies.lists(strategies.one_of(strategies.just(1), strategies.integers(0, 60)),
                             max_size=12),
    ranks=strategies.sampled_from([1, 2, 3, 4, 6]),
    team=strategies.sampled_from([1, 2, 3]),
    slack=strategies.floats(1e-6, 5.0),
    band=strategies.sampled_from(list(BANDS.values())),
    zigzag=strategies.booleans(),
)  # fmt: skip
def test_keys_of_any_lengths_arrive(lengths, ranks, team, slack, band, zigzag):
    """Also between teams, whose ranks divide their tokens evenly."""
    tokens = Tokens.of(lengths, ranks * team, zigzag, slack=slack, team=team)
    check_keys(tokens, band)
    teams = tokens.teams(team)
    check_keys(teams, band)
    for number in range(ranks):
        some = range(team * number, team * (number + 1))
        indices = numpy.concatenate([tokens.index(rank) for rank in some])
        assert numpy.array_equal(numpy.sort(indices), teams.index(number))
        counts = tokens.counts[team * number : team * (number + 1)]
        assert counts.max() - counts.min() <= 2
    if teams.apart:
        assert share(teams, band) == 0.0


@pytest.mark.parametrize("ranks", [8, 64, 256])
def test_bytes_are_those_of_the_formula(ranks):
    """All keys of others, for a causal mask; with a window, its keys before each of two parts."""
    tokens = Tokens.of([16 * ranks], ranks)
    row = 8 * (128 + 64) * 2  # bytes of k and v
    plan = exchange(tokens, ranks // 2, BANDS["causal"])
    received = (ranks - 1) * plan.rows * row
    assert received / tokens.counts[0] == keys_bytes(ranks, 8, (128, 64), 2)
    plan = exchange(tokens, ranks // 2, Band(8, 0))
    assert not plan.everything and sum(plan.receive_counts) == 16 + 2 * 8
    # Each of 2 P parts needs 8 keys of another rank, but the first one has nothing before it, and
    # the two parts of the last rank touch.
    assert share(tokens, Band(8, 0)) == 8 * (2 * ranks - 2) / (ranks - 1) / (16 * ranks)


@pytest.mark.parametrize(("window", "everything"), [(4, False), (63, True)])
def test_two_ranks_send_what_a_window_needs(window, everything):
    """Half of all keys are a rank's own: they say nothing about what must travel."""
    tokens = Tokens.of([128], 2)
    plan = exchange(tokens, 0, Band(window, 0))
    assert plan.everything == everything
    assert plan.receive_counts == ([] if everything else [64, 4])


def test_ranks_send_as_many_heads_at_once(monkeypatch):
    """Also where a window lets some of them receive fewer keys than others."""
    tokens, band, shape = Tokens.of([128], 4), Band(16, 0), torch.empty(32, 4, 16)
    plans = [exchange(tokens, rank, band) for rank in range(4)]
    assert [sum(x.receive_counts) for x in plans] == [48, 64, 64, 48]
    monkeypatch.setattr(choice, "LEAST_BYTES", 7000)  # of one head 48 keys have fewer, 64 more
    ways = [GatheredKeys.of(Team(None, 4, r), None, x, [], "cpu") for r, x in enumerate(plans)]
    assert [way.heads_at_once(shape, shape) for way in ways] == [1] * 4


def test_ranges():
    begin, end = numpy.array([3, 5, 5, 0]), numpy.array([5, 5, 7, 1])
    assert ranges(begin, end).tolist() == [3, 4, 5, 6, 0]
    assert ranges(begin[:0], end[:0]).tolist() == []
