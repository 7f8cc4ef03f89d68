"""Keys that GPUs copy into each other's memory, by ranks of one process and memory of the host."""

import ctypes
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import calls
import emulator
import numpy
import pytest
import torch

from cupyflash import jit
from cupyflash.ops.attention.options import NO_EXTRAS
from cupyflash.parallel import choice, peers, pieces
from cupyflash.parallel.copied import CopiedKeys
from cupyflash.parallel.copied_heads import CopiedHeads
from cupyflash.parallel.exchange import calls as calls_of
from cupyflash.parallel.routes import routes
from cupyflash.parallel.tokens import Band, Tokens, ranges
from cupyflash.parallel.transport import Team
from cupyflash.testing import expected

LENGTHS = {"one": [301], "many": [150, 3, 0, 61, 1], "tokens": [1, 1]}
BANDS = {
    "causal": ({"causal": True}, Band(None, 0)),
    "full": ({}, Band()),
    "window": ({"causal": True, "window": (20, 0)}, Band(20, 0)),
    "both sides": ({"window": (7, 3)}, Band(7, 3)),
    "steps": ({"causal": True, "window": (20, 0)}, Band(20, 0, 16)),
}


class Host:
    """Memory of the host that ranks of one process have in the place of that of GPUs.

    The kernels are emulated; what is put on a stream is done at once.
    """

    def __init__(self, ranks, together=False):
        self.ranks, self.arrays, self.told = ranks, [], set()
        self.barrier = threading.Barrier(ranks if together else 1)

    def of(self, rank):
        stream = SimpleNamespace(cuda_stream=0)
        found = Memory(Team(None, self.ranks, rank), torch.device("cpu"), 0, stream, stream)
        found.host = self
        return found


class Memory(peers.Peers):
    def enter(self, size):
        self.host.barrier.wait(10)
        if self.team.rank == 0 and not self.host.arrays:
            more = (1 + self.team.size) * size  # than a later use needs, all tokens on one rank
            for _ in range(self.team.size):
                self.host.arrays.append(torch.full((more,), 255, dtype=torch.uint8))  # NaN
        self.host.barrier.wait(10)
        self.memory = self.host.arrays[self.team.rank]
        self.handle = SimpleNamespace(buffer_ptrs=[x.data_ptr() for x in self.host.arrays])

    def follow(self, *_):
        pass

    leave = join = follow

    def tell(self, rank, channel):
        assert (self.team.rank, rank, channel) not in self.host.told
        self.host.told.add((self.team.rank, rank, channel))

    def hear(self, rank, channel):
        signal = rank, self.team.rank, channel
        for _ in range(1000):
            if signal in self.host.told:
                return self.host.told.remove(signal)
            time.sleep(0.01)
        raise AssertionError("no signal")


def copy_rows(target, pitch_there, source, pitch, width, rows, stream):
    for row in range(rows):
        ctypes.memmove(target + row * pitch_there, source + row * pitch, width)


@pytest.fixture(scope="module")
def folder(emulated_kernels):
    return emulator.prepared(emulated_kernels)


@pytest.fixture(params=["engines", "kernel"])
def launched(request, folder, monkeypatch):
    """The names of the kernels that have run."""
    if not emulator.COMPILER:
        pytest.skip("needs g++")
    found = []
    load = lambda config, device: emulator.Emulated(config, folder, found, "")  # noqa: E731
    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(peers, "copy_rows", copy_rows)
    monkeypatch.setattr(choice, "COPY_SECONDS", 0 if request.param == "engines" else 1)
    yield found
    assert ("put_rows" in found) == (request.param == "kernel")


CASES = [
    (ranks, LENGTHS[lengths], band, zigzag, 0.0)
    for i, (ranks, lengths) in enumerate(itertools.product([1, 2, 3, 8], LENGTHS))
    for j, (band, zigzag) in enumerate(itertools.product(BANDS, [True, False]))
    if (i + j) % 4 == 0
]
# The longest sequence is divided, or none; two ranks have no tokens.
CASES += [
    (3, [150, 40, 0, 61, 30], "causal", True, 0.3),
    (2, [150, 40, 0, 61, 150], "both sides", True, 0.3),
    (4, [150, 40, 1], "window", False, 2.5),
    (4, [9, 8], "causal", True, 3.0),
]


@pytest.mark.parametrize(("ranks", "lengths", "band", "zigzag", "slack"), CASES, ids=str)
def test_attention_by_copies(ranks, lengths, band, zigzag, slack, launched):
    options, band = BANDS[band]
    inputs, _ = calls.problem(lengths, "float32", (4, 2), 16, {})
    tokens = Tokens.of(lengths, ranks, zigzag, slack=slack)
    host, found = Host(ranks), routes(tokens, band)
    index = [torch.from_numpy(tokens.index(rank)) for rank in range(ranks)]
    made = [calls_of(tokens, rank, band) for rank in range(ranks)]
    rows = [[len(x.keys) for x in some] for some in made]
    groups = [slice(0, 1), slice(1, 2)]
    journeys = [
        CopiedKeys(Team(None, ranks, rank), None, host.of(rank), found, rows[rank]).start(
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
                out, lse = pieces.forward(device_calls, q[:, mine], pairs, {}, NO_EXTRAS)
                dq, gradients, _ = pieces.backward(
                    device_calls, dout[:, mine], q[:, mine], pairs, out, lse, None, {}, NO_EXTRAS
                )
                whole["out"][:, mine], whole["dq"][:, mine] = out, dq
                whole["lse"][:, mine] = lse.t()
            journey.give(number, gradients)
        results.append((index[rank], whole))
    for (_, whole), journey in zip(results, journeys, strict=True):
        whole["dk"], whole["dv"] = journey.gradients()
    assert not host.told  # each signal was heard
    assert "sum_rows" in launched
    right = expected(inputs, **options)
    right.check(**calls.whole(results, sum(lengths)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("slack", [0.0, 3.0])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_heads_by_copies(lengths, slack, ranks, launched):
    """There and back, ranks one after another: what has arrived is looked at at the end."""
    tokens, host = Tokens.of(lengths, ranks, slack=slack), Host(ranks, together=True)
    index, runs = zip(*((tokens.index(rank), tokens.runs(rank)) for rank in range(ranks)))
    q = torch.randn(sum(lengths), ranks, 6)
    k = torch.randn(sum(lengths), ranks, 4, dtype=torch.float16)

    def there_and_back(rank):
        whole, team = tokens.teams(ranks).runs(0), Team(None, ranks, rank)
        heads = CopiedHeads(team, None, host.of(rank), whole, list(runs))
        split = heads.to_heads([x[index[rank]] for x in (q, k)])
        return split, heads.to_tokens(split)

    with ThreadPoolExecutor(ranks) as pool:
        for rank, (split, joined) in enumerate(pool.map(there_and_back, range(ranks))):
            for x, some, back in zip((q, k), split, joined, strict=True):
                assert torch.equal(some, x[:, rank]) and torch.equal(back, x[index[rank]])
    assert not host.told


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("slack", [0.0, 0.5])
@pytest.mark.parametrize("lengths", [[4096], [5, 1, 300], [90, 300, 80, 85, 5]], ids=str)
def test_each_key_and_gradient_once(lengths, slack, ranks):
    """Numbers of tokens in the place of keys, and in the place of gradients ones."""
    tokens, band = Tokens.of(lengths, ranks, slack=slack), Band(None, 0)
    found = routes(tokens, band)
    keys, seen = numpy.full((ranks, found.keys), -1), numpy.zeros(tokens.total, int)
    slots = numpy.zeros((ranks, found.slots), int)
    for source, target, row, place, rows, slot in zip(*(x.tolist() for x in found.copies)):
        own = tokens.index(source)[row : row + rows]
        assert (keys[target, place : place + rows] == -1).all()
        keys[target, place : place + rows] = own
        slots[source, slot : slot + rows] += 1
    for rank in range(ranks):
        wanted = [call.keys for call in calls_of(tokens, rank, band)]
        wanted = numpy.concatenate([numpy.arange(0), *wanted])
        assert numpy.array_equal(keys[rank, : len(wanted)], wanted)
        numpy.add.at(seen, wanted, 1)
    for rank, parts in enumerate(found.sums):
        row = 0
        for rows, slot, count in zip(*(x.tolist() for x in parts)):
            assert (slots[rank, slot : slot + count * rows] == 1).all()
            own = tokens.index(rank)[row : row + rows]
            assert (seen[own] == count).all()
            row += rows
        assert row == tokens.counts[rank]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_runs(size):
    """The runs of a rank are its tokens, and a team finds each of them."""
    tokens = Tokens.of([97, 3, 0, 64, 10], 8)
    team = tokens.teams(size).runs(0)
    numbers = numpy.sort(numpy.concatenate([tokens.index(rank) for rank in range(size)]))
    for rank in range(size):
        own, runs = tokens.index(rank), tokens.runs(rank)
        assert numpy.array_equal(ranges(runs.begin, runs.end), own)
        assert (runs.begin[1:] > runs.end[:-1]).all()  # those that touch are one
        assert numpy.array_equal(runs.rows(own), numpy.arange(len(own)))
        assert numpy.array_equal(team.rows(own), numpy.searchsorted(numbers, own))


def test_engines_make_few_large_copies():
    """Of a sequence of 8192 tokens a GPU, not of twelve documents."""
    row = 2 * 8 * 128 * 2  # bytes of keys and values
    for ranks in (2, 4, 8):
        shares = {"one": [1], "documents": [1 / 4, 1 / 4, 1 / 8, 1 / 8, *[1 / 32] * 8]}
        for name, parts in shares.items():
            tokens = Tokens.of([int(8192 * ranks * x) for x in parts], ranks)
            copies = routes(tokens, Band(None, 0)).copies
            sent = copies.some((copies.source == 0) & (copies.target != 0))
            pay = choice.engines_pay(2 * len(sent.rows), row * int(sent.rows.sum()))
            assert pay == (name == "one"), (ranks, name)
