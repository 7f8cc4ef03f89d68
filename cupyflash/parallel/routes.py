"""Which rows each rank writes into the memory of the others: keys there, their gradients back.

Every rank has the keys of its calls in one array, piece after piece, so that a key that two pieces
see lies there twice. A copy brings rows of one rank to their places in the array of another, or of
its own. Gradients go the same way back, into slots: the rows of a rank are cut into parts that the
same copies have read, and a part has as many slots as it has copies, one behind the other. So the
gradient of a part is a sum over its slots, in an order that is always the same.
"""

import dataclasses
from typing import NamedTuple

import numpy

from .exchange import calls
from .tokens import Band, Runs, Tokens, ranges


class Copies(NamedTuple):
    """Rows that one rank reads and another one, or itself, gets; int64 arrays of one length.

    Attributes:
        source, target: the ranks.
        row: the first of the rows of the source.
        place: the first of the rows among the keys of the target.
        rows: how many.
        slot: where their gradients go, the first of the rows of the slots of the source.
    """

    source: numpy.ndarray
    target: numpy.ndarray
    row: numpy.ndarray
    place: numpy.ndarray
    rows: numpy.ndarray
    slot: numpy.ndarray

    def some(self, chosen: numpy.ndarray) -> "Copies":
        """The copies with these indices, or where a mask is true."""
        return Copies(*(x[chosen] for x in self))


class Sums(NamedTuple):
    """Parts of the rows of a rank, in their order, and their slots; int64 arrays of one length.

    Attributes:
        rows: how many rows.
        slot: the first slot of the first row.
        count: how many slots each row has; the next one lies ``rows`` behind.
    """

    rows: numpy.ndarray
    slot: numpy.ndarray
    count: numpy.ndarray


@dataclasses.dataclass(frozen=True)
class Routes:
    """The ways of the keys of all ranks.

    Attributes:
        copies: of all ranks.
        sums: for each rank its parts; some have no slots.
        keys, slots: the most rows of keys, and of slots, that a rank has.
        travelling: the most rows that a rank gets from others.
    """

    copies: Copies
    sums: list[Sums]
    keys: int
    slots: int
    travelling: int


def routes(tokens: Tokens, band: Band) -> Routes:
    """The ways of the keys."""
    owned = _Owned.of(tokens)
    keys, found = [], []
    for target in range(tokens.ranks):
        made = calls(tokens, target, band)
        first, counts = [numpy.zeros(0, numpy.int64)], [numpy.zeros(0, numpy.int64)]
        first += [call.first for call in made]
        counts += [numpy.diff(call.cu_seqlens_k) for call in made]
        found.append(owned.copies(target, numpy.concatenate(first), numpy.concatenate(counts)))
        keys.append(int(numpy.concatenate(counts).sum()))
    copies = Copies(*map(numpy.concatenate, zip(*found)))
    parts, sums, slots = [], [], []
    for source in range(tokens.ranks):
        own = copies.some(copies.source == source)
        own, some, size = _slots(own, int(tokens.counts[source]))
        parts.append(own)
        sums.append(some)
        slots.append(size)
    copies = Copies(*map(numpy.concatenate, zip(*parts)))
    others = copies.some(copies.source != copies.target)
    arriving = numpy.bincount(others.target, others.rows, minlength=1)
    return Routes(copies, sums, max(keys), max(slots), int(arriving.max()))


class _Owned(NamedTuple):
    """The runs of all ranks, in the order of their numbers, and the rank of each."""

    runs: Runs
    source: numpy.ndarray

    @classmethod
    def of(cls, tokens: Tokens) -> "_Owned":
        every = [tokens.runs(rank) for rank in range(tokens.ranks)]
        runs = Runs(*map(numpy.concatenate, zip(*every)))
        order = numpy.argsort(runs.begin)
        source = numpy.repeat(numpy.arange(len(every)), [len(x.begin) for x in every])
        return cls(Runs(*(x[order] for x in runs)), source[order])

    def copies(self, target: int, first: numpy.ndarray, counts: numpy.ndarray) -> Copies:
        """The copies of ranges of keys, of this first number and length, to one place after another
        of a rank.
        """
        runs, place = self.runs, numpy.cumsum(counts) - counts
        low = numpy.searchsorted(runs.end, first, side="right")
        high = numpy.maximum(low, numpy.searchsorted(runs.begin, first + counts, side="left"))
        run, piece = ranges(low, high), numpy.repeat(numpy.arange(len(first)), high - low)
        begin = numpy.maximum(first[piece], runs.begin[run])
        end = numpy.minimum((first + counts)[piece], runs.end[run])
        row = runs.row[run] + begin - runs.begin[run]
        there = place[piece] + begin - first[piece]
        targets, slots = numpy.full_like(run, target), numpy.zeros_like(run)
        return Copies(self.source[run], targets, row, there, end - begin, slots)


def _slots(copies: Copies, rows: int) -> tuple[Copies, Sums, int]:
    """(the copies of one source, cut into parts, with their slots; the parts; rows of slots)."""
    cuts = numpy.unique(numpy.concatenate([[0, rows], copies.row, copies.row + copies.rows]))
    sizes = numpy.diff(cuts)
    low = numpy.searchsorted(cuts, copies.row)
    high = numpy.searchsorted(cuts, copies.row + copies.rows)
    part, copy = ranges(low, high), numpy.repeat(numpy.arange(len(low)), high - low)
    order = numpy.argsort(part, kind="stable")  # the slots of a part in the order of its copies
    part, copy = part[order], copy[order]
    slot = numpy.cumsum(sizes[part]) - sizes[part]
    found = copies.some(copy)
    place = found.place + cuts[part] - found.row
    found = found._replace(row=cuts[part], place=place, rows=sizes[part], slot=slot)
    count = numpy.bincount(part, minlength=len(sizes))
    first = numpy.cumsum(count * sizes) - count * sizes
    return found, Sums(sizes, first, count), int((count * sizes).sum())
