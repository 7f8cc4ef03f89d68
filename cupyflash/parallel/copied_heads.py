"""Heads by copies: each GPU writes its tokens where the others need them, in their order.

Nothing packs or sorts the rows of an all-to-all; what arrives is copied once, out of memory that
the next call needs.
"""

import dataclasses
from collections.abc import Sequence

import numpy
from torch import Tensor

from .peers import Peers, aligned
from .transport import Failures, Team

Run = tuple[int, int, int]  # the first row of a rank, the first one among those of the team, rows


@dataclasses.dataclass(frozen=True, eq=False)
class CopiedHeads:
    """The way between tokens and heads in a team.

    Attributes:
        runs: of the tokens of each rank.
    """

    team: Team
    failures: Failures
    peers: Peers
    runs: list[list[Run]]

    def to_heads(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """(tokens of this rank, ranks, columns) -> (tokens of the team, columns), of each."""
        xs = [x.contiguous() for x in xs]
        rows = sum(rows for runs in self.runs for *_, rows in runs)
        places = self._enter(xs, rows, [x.shape[2] for x in xs])
        for rank in self._ranks():
            for x, place in zip(xs, places):
                pitch = x.shape[2] * x.element_size()
                for row, first, count in self.runs[self.team.rank]:
                    there = place + first * pitch
                    self._put(rank, there, pitch, x[:, rank], row, count)
            self._tell(rank)
        return self._results(xs, places, [(rows, x.shape[2]) for x in xs])

    def to_tokens(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The way back, (tokens of the team, columns) -> (tokens of this rank, ranks, columns)."""
        xs = [x.contiguous() for x in xs]
        size, mine = self.team.size, self.team.rank
        counts = [sum(rows for *_, rows in runs) for runs in self.runs]
        places = self._enter(xs, size * max(counts), [x.shape[1] for x in xs])
        for rank in self._ranks():
            for x, place in zip(xs, places):
                width = x.shape[1] * x.element_size()
                for row, first, count in self.runs[rank]:
                    there = place + (row * size + mine) * width
                    self._put(rank, there, size * width, x, first, count)
            self._tell(rank)
        return self._results(xs, places, [(counts[mine], size, x.shape[1]) for x in xs])

    def _ranks(self) -> list[int]:
        """All of them, this one last, as its copies take the least time."""
        return [(self.team.rank + x) % self.team.size for x in range(1, self.team.size + 1)]

    def _enter(self, xs: list[Tensor], rows: int, columns: list[int]) -> list[int]:
        """The places, in bytes, of so many rows for each of ``xs``."""
        places, size = [], 0
        for x, width in zip(xs, columns):
            places.append(size)
            size += aligned(rows * width * x.element_size())
        self.peers.enter(size)
        return places

    def _put(self, rank: int, place: int, pitch: int, x: Tensor, row: int, count: int) -> None:
        rows, own = slice(row, row + count), rank == self.team.rank
        self.peers.put(rank, place, pitch, x, rows, own=own)

    def _tell(self, rank: int) -> None:
        if rank != self.team.rank:
            self.peers.tell(rank, 0)

    def _results(
        self, xs: list[Tensor], places: list[int], shapes: list[tuple[int, ...]]
    ) -> list[Tensor]:
        for rank in self._ranks()[:-1]:
            self.peers.hear(rank, 0)
        found = [
            self.peers.tensor(place, shape, x.dtype).clone()
            for x, place, shape in zip(xs, places, shapes)
        ]
        self.peers.leave()
        return found


def runs(indices: list[numpy.ndarray], most: int) -> list[list[Run]] | None:
    """The runs of the tokens with these numbers, which ascend; None if a rank has too many.

    Args:
        indices: the numbers of the tokens of each rank.
        most: runs of a rank.
    """
    whole, found = numpy.sort(numpy.concatenate(indices)), []
    for numbers in indices:
        places = numpy.searchsorted(whole, numbers)
        cuts = numpy.flatnonzero(numpy.diff(places) != 1) + 1
        if len(cuts) >= most:
            return None
        rows = numpy.split(numpy.arange(len(places)), cuts)
        found.append([(int(x[0]), int(places[x[0]]), len(x)) for x in rows if len(x)])
    return found
