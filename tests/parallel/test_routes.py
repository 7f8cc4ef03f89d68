"""Keys that GPUs copy into each other's memory, by ranks of one process and memory of the host."""

import itertools

import calls
import numpy
import pytest
import torch

from cupyflash.parallel import pieces
from cupyflash.parallel.copied import CopiedKeys
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

    def __init__(self, ranks):
        self.arrays, self.told = [torch.empty(0, dtype=torch.uint8)] * ranks, set()

    def of(self, rank):
        peers = Memory.__new__(Memory)
        peers.__dict__.update(self.__dict__, rank=rank)
        return peers

    def enter(self, size):
        if not len(self.arrays[self.rank]):  # all exist before the first rank writes
            for rank in range(len(self.arrays)):
                self.arrays[rank] = torch.full((size,), 255, dtype=torch.uint8)  # NaN
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
        self.told.remove((rank, self.rank, channel))


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
    groups = [slice(0, 1), slice(1, 2)]
    journeys = [
        CopiedKeys(Team(None, ranks, rank), None, memory.of(rank), found).start(
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
            pairs = journey.arrived(number, [x.keys for x in device_calls])
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


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("lengths", [[4096], [5, 1, 300]], ids=str)
def test_each_key_and_gradient_once(lengths, ranks):
    """Numbers of tokens in the place of keys, and in the place of gradients ones."""
    tokens, band = Tokens.of(lengths, ranks), Band(None, 0)
    found = routes(tokens, band, most=10000)
    keys, seen = numpy.full((ranks, found.keys), -1), numpy.zeros(tokens.total, int)
    slots = numpy.zeros((ranks, found.slots), int)
    for copy in found.copies:
        own = tokens.index(copy.source)[copy.row : copy.row + copy.rows]
        assert (keys[copy.target, copy.place : copy.place + copy.rows] == -1).all()
        keys[copy.target, copy.place : copy.place + copy.rows] = own
        slots[copy.source, copy.slot : copy.slot + copy.rows] += 1
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
