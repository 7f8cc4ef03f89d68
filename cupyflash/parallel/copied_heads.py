"""Heads by copies: each GPU writes its tokens where the others need them, in their order.

Nothing packs or sorts the rows of an all-to-all; what arrives is copied once, out of memory that
the next call needs.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy
from torch import Tensor

from .peers import Copies, Peers, Source, aligned
from .tokens import Runs
from .transport import Failures, Team


@dataclasses.dataclass(frozen=True, eq=False)
class CopiedHeads:
    """The way between tokens and heads in a team.

    Attributes:
        whole: the runs of the tokens of the team.
        runs: of the tokens of each rank.
    """

    team: Team
    failures: Failures
    peers: Peers
    whole: Runs
    runs: list[Runs]

    def to_heads(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """(tokens of this rank, ranks, columns) -> (tokens of the team, columns), of each."""
        xs = [x.contiguous() for x in xs]
        rows, columns = sum(self.counts), [x.shape[2] for x in xs]
        places = self._enter(xs, rows, columns)
        pitches = [n * x.element_size() for x, n in zip(xs, columns)]
        sources = [
            Source(x[:, 0], place, pitch, pitch) for x, place, pitch in zip(xs, places, pitches)
        ]
        heard = [rank for rank, count in enumerate(self.counts) if count]
        return self._moved(self.to_all, sources, heard, places, [(rows, n) for n in columns])

    def to_tokens(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The way back, (tokens of the team, columns) -> (tokens of this rank, ranks, columns)."""
        xs = [x.contiguous() for x in xs]
        size, mine, columns = self.team.size, self.team.rank, [x.shape[1] for x in xs]
        places = self._enter(xs, size * max(self.counts), columns)
        widths = [n * x.element_size() for x, n in zip(xs, columns)]
        sources = [
            Source(x, place + mine * width, size * width)
            for x, place, width in zip(xs, places, widths)
        ]
        shapes = [(self.counts[mine], size, n) for n in columns]
        heard = range(size) if self.counts[mine] else ()
        return self._moved(self.from_all, sources, heard, places, shapes)

    @functools.cached_property
    def counts(self) -> list[int]:
        """The tokens of each rank."""
        return [int((x.end - x.begin).sum()) for x in self.runs]

    @functools.cached_property
    def to_all(self) -> Copies:
        """The tokens of this rank, for all ranks."""
        size, mine = self.team.size, self.runs[self.team.rank]
        ranks = numpy.repeat(numpy.arange(size), len(mine.row))
        columns = mine.row, self.whole.rows(mine.begin), mine.end - mine.begin
        columns = (numpy.tile(x, size) for x in columns)
        return Copies(self.team, self.peers.device, ranks, *columns)

    @functools.cached_property
    def from_all(self) -> Copies:
        """The copies of the tokens of each rank out of those of the team."""
        ranks = numpy.repeat(numpy.arange(self.team.size), [len(x.row) for x in self.runs])
        begin, end, row = map(numpy.concatenate, zip(*self.runs))
        columns = ranks, self.whole.rows(begin), row, end - begin
        return Copies(self.team, self.peers.device, *columns)

    def _enter(self, xs: list[Tensor], rows: int, columns: list[int]) -> list[int]:
        """Enters the memory for ``rows`` rows of each of ``xs``; returns their places in bytes."""
        places, size = [], 0
        for x, width in zip(xs, columns):
            places.append(size)
            size += aligned(rows * width * x.element_size())
        self.peers.enter(size)
        return places

    def _moved(
        self,
        copies: Copies,
        sources: list[Source],
        heard: Iterable[int],
        places: list[int],
        shapes: list[tuple[int, ...]],
    ) -> list[Tensor]:
        """What arrives from the ranks that are ``heard`` at these places, in these shapes."""
        peers = self.peers
        peers.send(copies, sources, 0)
        peers.join()  # its own rows are the last
        for rank in heard:
            if rank != self.team.rank:
                peers.hear(rank, 0)
        found = [
            peers.tensor(place, shape, source.x.dtype).clone()
            for source, place, shape in zip(sources, places, shapes)
        ]
        peers.leave()
        return found
