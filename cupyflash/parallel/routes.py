"""Which rows each rank writes into the memory of the others: keys there, their gradients back.

Every rank has the keys of its calls in one array, piece after piece, so that a key that two pieces
see lies there twice. A copy brings rows of one rank to their places in the array of another, or of
its own. Gradients go the same way back, into slots: the rows of a rank are cut into parts that the
same copies have read, and a part has as many slots as it has copies, one behind the other. So the
gradient of a part is a sum over its slots, in an order that is always the same.
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy

from .exchange import calls
from .tokens import Band, Tokens


class Copy(NamedTuple):
    """Rows that one rank reads and another one, or itself, gets.

    Attributes:
        source, target: the ranks.
        row: the first of the rows of the source.
        place: the first of the rows among the keys of the target.
        rows: how many.
        slot: where their gradients go, the first of the rows of the slots of the source.
    """

    source: int
    target: int
    row: int
    place: int
    rows: int
    slot: int = 0


class Sum(NamedTuple):
    """Rows of a rank, and their slots: ``count`` times as many, one behind the other."""

    row: int
    rows: int
    slot: int
    count: int


@dataclasses.dataclass(frozen=True)
class Routes:
    """The ways of the keys of all ranks.

    Attributes:
        copies: of all ranks.
        sums: for each rank its parts, in the order of their rows; some have no slots.
        keys, slots: the most rows of keys, and of slots, that a rank has.
        travelling: the most rows that a rank gets from others.
    """

    copies: list[Copy]
    sums: list[list[Sum]]
    keys: int
    slots: int
    travelling: int


def routes(tokens: Tokens, band: Band, most: int) -> Routes | None:
    """The ways of the keys, or None if a rank has more than ``most`` copies for each other one."""
    if len(tokens.lengths) > most:
        return None
    owned = [_runs(tokens, rank) for rank in range(tokens.ranks)]
    keys, copies = [], []
    for target in range(tokens.ranks):
        place = 0
        for call in calls(tokens, target, band):
            for first, count in zip(call.first.tolist(), numpy.diff(call.cu_seqlens_k).tolist()):
                copies += _copies(owned, target, first, first + count, place)
                place += count
        keys.append(place)
    found, sums, slots = [], [], []
    for source in range(tokens.ranks):
        own = [copy for copy in copies if copy.source == source]
        some, parts, size = _slots(own, int(tokens.counts[source]))
        if len(some) > most * tokens.ranks:
            return None
        found += some
        sums.append(parts)
        slots.append(size)
    arriving = [0] * tokens.ranks
    for copy in found:
        arriving[copy.target] += copy.rows * (copy.source != copy.target)
    return Routes(found, sums, max(keys), max(slots), max(arriving))


def _runs(tokens: Tokens, rank: int) -> list[tuple[int, int, int]]:
    """(first number, number behind the last, row of the first) of each run of a rank."""
    pieces = tokens.pieces(rank)
    begin = tokens.starts[pieces.sequence] + pieces.begin
    sizes = pieces.end - pieces.begin
    rows = numpy.cumsum(sizes) - sizes
    return list(zip(begin.tolist(), (begin + sizes).tolist(), rows.tolist()))


def _copies(
    owned: list[list[tuple[int, int, int]]], target: int, begin: int, end: int, place: int
) -> list[Copy]:
    """The copies of the keys with the numbers [begin, end), which come to ``place``."""
    found = []
    for source, runs in enumerate(owned):
        for first, last, row in runs:
            low, high = max(begin, first), min(end, last)
            if low < high:
                there = place + low - begin
                found.append(Copy(source, target, row + low - first, there, high - low))
    return found


def _slots(copies: list[Copy], rows: int) -> tuple[list[Copy], list[Sum], int]:
    """(the copies of one source, cut into parts, with their slots; the parts; rows of slots)."""
    cuts = {0, rows}
    for copy in copies:
        cuts |= {copy.row, copy.row + copy.rows}
    found, sums, size = [], [], 0
    for begin, end in itertools.pairwise(sorted(cuts)):
        length, first = end - begin, size
        for copy in copies:
            if copy.row <= begin < copy.row + copy.rows:
                place = copy.place + begin - copy.row
                found.append(copy._replace(row=begin, place=place, rows=length, slot=size))
                size += length
        sums.append(Sum(begin, length, first, (size - first) // length))
    return found, sums, size
