"""Keys that GPUs copy into each other's memory, by ranks of one process and memory of the host."""

import copy
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import calls
import numpy
import pytest
import torch

from cupyflash.parallel import pieces
from cupyflash.parallel.copied import CopiedKeys
from cupyflash.parallel.copied_heads import CopiedHeads, runs
from cupyflash.parallel.exchange import calls as calls_of
from cupyflash.parallel.routes import routes
from cupyflash.parallel.tokens import Band, Tokens
from cupyflash.parallel.transport import Team
from cupyflash.testing import expected

LENGTHS = {"one": [301], "many": [150, 3, 0, 61, 1], "tokens": [1, 1]}
BANDS = {
    "causal": ({"causal": True}, Band(None, 0)),
    "full": ({}, Band()),
    "window": ({"causal": True, "window": (20, 0)}, Band(20, 0)),
    "both sides": ({"window": (7, 3)}, Band(7, 3)),
}


class Memory:
    """What `peers.Peers` offers, on arrays of the host that all ranks reach; it keeps order."""

    def __init__(self, ranks, together=False):
        self.arrays, self.told, self.rank = [], set(), None
        self.barrier = threading.Barrier(ranks if together else 1)

    def of(self, rank):
        peers = copy.copy(self)
        peers.rank = rank
        return peers

    def enter(self, size):
        self.barrier.wait(10)
        if len(self.arrays) == 0:
            self.arrays += [
                torch.full((2 * size,), 255, dtype=torch.uint8) for _ in range(9)
            ]  # NaN
        self.barrier.wait(10)
        self.returning = False

    def tensor(self, place, shape, dtype):
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.arrays[self.rank][place : place + size].view(dtype).view(shape)

    def put(self, rank, place, pitch, source, rows, *, own=False):
        assert own == (rank == self.rank) or self.returning
        some = source[rows].flatten(1).contiguous().view(torch.uint8)
        self.arrays[rank].as_strided(some.shape, (pitch, 1), place).copy_(some)

    def follow(self, *_):
        self.returning = True

    def join(self):
        pass

    leave = join

    def tell(self, rank, channel):
        assert (self.rank, rank, channel) not in self.told
        self.told.add((self.rank, rank, channel))

    def hear(self, rank, channel):
        for _ in range(1000):
            if (rank, self.rank, channel) in self.told:
                return self.told.remove((rank, self.rank, channel))
            time.sleep(0.01)
        raise AssertionError("no signal")


CASES = [
    (ranks, LENGTHS[lengths], band, zigzag)
    for i, (ranks, lengths) in enumerate(itertools.product([1, 2, 3, 8], LENGTHS))
    for j, (band, zigzag) in enumerate(itertools.product(BANDS, [True, False]))
    if (i + j) % 4 == 0
]


@pytest.mark.parametrize(("ranks", "lengths", "band", "zigzag"), CASES, ids=str)
def test_attention_by_copies(ranks, lengths, band, zigzag):
    options, band = BANDS[band]
    inputs, _ = calls.problem(lengths, "float32", (4, 2), 16, {})
    tokens = Tokens.of(lengths, ranks, zigzag)
    memory, found = Memory(ranks), routes(tokens, band, most=1000)
    index = [torch.from_numpy(tokens.index(rank)) for rank in range(ranks)]
    made = [calls_of(tokens, rank, band) for rank in range(ranks)]
    rows = [[len(x.keys) for x in some] for some in made]
    groups = [slice(0, 1), slice(1, 2)]
    journeys = [
        CopiedKeys(Team(None, ranks, rank), None, memory.of(rank), found, rows[rank]).start(
            inputs.k[index[rank]], inputs.v[index[rank]], groups, gradients=True
        )
        for rank in range(ranks)
    ]
    results = []
    for rank, journey in enumerate(journeys):
        device_calls = [pieces.DeviceCall.of(x, inputs.k.device) for x in made[rank]]
        q, dout = inputs.q[index[rank]], inputs.dout[index[rank]]
        whole = {name: torch.empty_like(q) for name in ("out", "dq")}
        whole["lse"] = q.new_empty(len(q), 4)
        for number in range(len(groups)):
            pairs = journey.arrived(number)
            mine = slice(2 * number, 2 * number + 2)
            gradients = []
            if device_calls:
                out, lse = pieces.forward(device_calls, q[:, mine], pairs, {}, None, None)
                dq, gradients, _ = pieces.backward(
                    device_calls, dout[:, mine], q[:, mine], pairs, out, lse, None, {}, None, None
                )
                whole["out"][:, mine], whole["dq"][:, mine] = out, dq
                whole["lse"][:, mine] = lse.t()
            journey.give(number, gradients)
        results.append((index[rank], whole))
    for (_, whole), journey in zip(results, journeys, strict=True):
        whole["dk"], whole["dv"] = journey.gradients()
    assert not memory.told  # each signal was heard
    right = expected(inputs, **options)
    right.check(**calls.whole(results, sum(lengths)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_heads_by_copies(lengths, ranks):
    """There and back, ranks one after another: what has arrived is looked at at the end."""
    tokens, memory = Tokens.of(lengths, ranks), Memory(ranks, together=True)
    index = [tokens.index(rank) for rank in range(ranks)]
    found, most = runs(index, most=1000), max(len(x) for x in runs(index, most=1000))
    assert runs(index, max(1, most)) == found
    assert most < 2 or runs(index, most - 1) is None
    q = torch.randn(sum(lengths), ranks, 6)
    k = torch.randn(sum(lengths), ranks, 4, dtype=torch.float16)

    def there_and_back(rank):
        heads = CopiedHeads(Team(None, ranks, rank), None, memory.of(rank), found)
        split = heads.to_heads([x[index[rank]] for x in (q, k)])
        return split, heads.to_tokens(split)

    with ThreadPoolExecutor(ranks) as pool:
        for rank, (split, joined) in enumerate(pool.map(there_and_back, range(ranks))):
            for x, some, back in zip((q, k), split, joined, strict=True):
                assert torch.equal(some, x[:, rank]) and torch.equal(back, x[index[rank]])
    assert not memory.told


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("lengths", [[4096], [5, 1, 300]], ids=str)
def test_each_key_and_gradient_once(lengths, ranks):
    """Numbers of tokens in the place of keys, and in the place of gradients ones."""
    tokens, band = Tokens.of(lengths, ranks), Band(None, 0)
    found = routes(tokens, band, most=10000)
    keys, seen = numpy.full((ranks, found.keys), -1), numpy.zeros(tokens.total, int)
    slots = numpy.zeros((ranks, found.slots), int)
    for way in found.copies:
        own = tokens.index(way.source)[way.row : way.row + way.rows]
        assert (keys[way.target, way.place : way.place + way.rows] == -1).all()
        keys[way.target, way.place : way.place + way.rows] = own
        slots[way.source, way.slot : way.slot + way.rows] += 1
    for rank in range(ranks):
        wanted = [call.keys for call in calls_of(tokens, rank, band)]
        wanted = numpy.concatenate([numpy.arange(0), *wanted])
        assert numpy.array_equal(keys[rank, : len(wanted)], wanted)
        numpy.add.at(seen, wanted, 1)
    for rank, parts in enumerate(found.sums):
        row = 0
        for part in parts:
            assert part.row == row
            some = slots[rank, part.slot : part.slot + part.count * part.rows]
            assert (some == 1).all()
            own = tokens.index(rank)[row : row + part.rows]
            assert (seen[own] == part.count).all()
            row += part.rows
        assert row == tokens.counts[rank]


def test_many_copies_are_left_to_collectives():
    tokens = Tokens.of([100] * 12, 2)
    counts = [sum(x.source == rank for x in routes(tokens, Band(), 1000).copies) for rank in (0, 1)]
    most = max(counts) // 2
    assert routes(tokens, Band(), most) is not None and routes(tokens, Band(), most - 1) is None
    assert routes(Tokens.of([1] * 1000, 2), Band(), 16) is None
