"""Which tokens of packed sequences each rank holds, and which keys they see: arithmetic alone.

A sequence is cut into parts, and a rank holds one or two of them. Numbers of tokens count through
all sequences, one after another; positions count from the first token of a sequence.

A query at position i sees the keys from i - left to i + right. The work of a causal query grows
with its position, so that with zigzag rank r of P holds the parts r and 2 P - 1 - r of a sequence:
an early one and a late one. Of the sequences that have no whole number of tokens a part, every
second one is mirrored: rank P - 1 - r holds them, as the longer parts would else always be those of
the same ranks.

A sequence that is whole (`placement`) is cut so that only parts of its rank are not empty.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from .placement import DIVIDED, placed


class Band(NamedTuple):
    """The keys that a query sees on each side of its own position; None is unlimited.

    Attributes:
        step: the queries and the keys of a piece begin at a multiple of it.
    """

    left: int | None = None
    right: int | None = None
    step: int = 1

    @property
    def limited(self) -> bool:
        """Whether a query does not see all keys."""
        return self.left is not None or self.right is not None


class Pieces(NamedTuple):
    """Runs of neighbouring tokens, in the order of their numbers; int64 arrays of one length.

    Attributes:
        sequence: the sequence of each run.
        begin, end: its positions [begin, end) in the sequence; never empty.
    """

    sequence: numpy.ndarray
    begin: numpy.ndarray
    end: numpy.ndarray


class Runs(NamedTuple):
    """Runs of neighbouring tokens of a rank, in their order; int64 arrays of one length.

    Attributes:
        begin, end: the numbers [begin, end) of the tokens of each run; never empty.
        row: the first of the rows that the rank has them in.
    """

    begin: numpy.ndarray
    end: numpy.ndarray
    row: numpy.ndarray

    def rows(self, numbers: numpy.ndarray) -> numpy.ndarray:
        """The rows of tokens that the rank has."""
        run = numpy.searchsorted(self.begin, numbers, side="right") - 1
        return self.row[run] + numbers - self.begin[run]


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """The division of packed sequences among ranks.

    Attributes:
        lengths: int64 (sequences,).
        cuts: int64 (sequences, parts + 1), the positions where parts begin, and the length.
        zigzag: a rank holds two parts of each sequence, from both ends; else one.
        mirrored: bool (sequences,), where ranks count from the other end.
    """

    lengths: numpy.ndarray
    cuts: numpy.ndarray
    zigzag: bool
    mirrored: numpy.ndarray

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        ranks: int,
        zigzag: bool = True,
        *,
        slack: float = 0.0,
        team: int = 1,
    ) -> "Tokens":
        """The division that lets ranks have up to (1 + slack) times the mean of tokens and work.

        Without slack all sequences are divided, else those that do not stay `placed` on one rank,
        or on ``team`` ranks that follow each other and divide their tokens evenly.
        """
        lengths = numpy.asarray(lengths, dtype=numpy.int64).reshape(-1)
        if not slack:
            return cls._even(lengths, ranks, zigzag)
        place = placed(lengths, ranks // team, slack)
        even = cls._even(numpy.where(place == DIVIDED, lengths, 0), ranks, zigzag)
        for number in numpy.unique(place[place != DIVIDED]).tolist():
            rows, first = numpy.flatnonzero(place == number), number * team
            whole = lengths[rows]
            even.cuts[rows, first + team :] = whole[:, None]
            columns = slice(first, first + team + 1)
            even.cuts[rows, columns] = cls._even(whole, team, False).cuts
        return dataclasses.replace(even, lengths=lengths)

    @classmethod
    def _even(cls, lengths: numpy.ndarray, ranks: int, zigzag: bool) -> "Tokens":
        """Parts of a sequence differ by one token at most, and ranks get the longer ones in turn.

        So ranks differ by one token, however many sequences there are, also of ones that have fewer
        tokens than there are ranks.
        """
        parts = 2 * ranks if zigzag else ranks
        part = numpy.arange(parts)
        size, longer = numpy.divmod(lengths, parts)
        uneven = longer > 0
        mirrored = uneven & (numpy.cumsum(uneven) % 2 == 0) & zigzag
        owner = numpy.minimum(part, parts - 1 - part) if zigzag else part
        owner = numpy.where(mirrored[:, None], ranks - 1 - owner, owner)
        turn = (numpy.cumsum(longer) - longer)[:, None] % ranks
        # The place of each part in the order in which the parts of a sequence become longer.
        place = (owner - turn) % ranks + (part >= ranks) * ranks
        sizes = size[:, None] + (place < longer[:, None])
        cuts = numpy.zeros((len(lengths), parts + 1), numpy.int64)
        numpy.cumsum(sizes, axis=1, out=cuts[:, 1:])
        return cls(lengths, cuts, zigzag, mirrored)

    @property
    def ranks(self) -> int:
        parts = self.cuts.shape[1] - 1
        return parts // 2 if self.zigzag else parts

    @property
    def total(self) -> int:
        """Tokens of all ranks."""
        return int(self.lengths.sum())

    @property
    def starts(self) -> numpy.ndarray:
        """int64 (sequences,), the number of the first token of each sequence."""
        return numpy.cumsum(self.lengths) - self.lengths

    @functools.cached_property
    def counts(self) -> numpy.ndarray:
        """int64 (ranks,), the tokens of each rank."""
        return self.sizes.sum(axis=0)

    @functools.cached_property
    def apart(self) -> bool:
        """Whether no sequence has tokens on two ranks."""
        return int(numpy.count_nonzero(self.sizes, axis=1).max(initial=0)) <= 1

    @property
    def sizes(self) -> numpy.ndarray:
        """int64 (sequences, ranks), the tokens that each rank has of each sequence."""
        sizes = numpy.diff(self.cuts, axis=1)
        if self.zigzag:
            sizes = sizes[:, : self.ranks] + sizes[:, self.ranks :][:, ::-1]
            sizes[self.mirrored] = sizes[self.mirrored, ::-1]
        return sizes

    def teams(self, size: int) -> "Tokens":
        """The same division among teams of ``size`` ranks that follow each other."""
        return dataclasses.replace(self, cuts=self.cuts[:, ::size])

    def of_rows(self, rows: int) -> "Tokens":
        """The sequences of several rows, one row after another, each divided in the same way."""
        return dataclasses.replace(
            self,
            lengths=numpy.tile(self.lengths, rows),
            cuts=numpy.tile(self.cuts, (rows, 1)),
            mirrored=numpy.tile(self.mirrored, rows),
        )

    def pieces(self, rank: int) -> Pieces:
        """The runs of a rank; two parts that touch are one run."""
        part = numpy.where(self.mirrored, self.ranks - 1 - rank, rank)[:, None]
        if self.zigzag:
            part = numpy.concatenate([part, 2 * self.ranks - 1 - part], axis=1)
        begin = numpy.take_along_axis(self.cuts, part, axis=1)
        end = numpy.take_along_axis(self.cuts, part + 1, axis=1)
        if self.zigzag:
            touch = end[:, 0] == begin[:, 1]
            end[touch, 0], begin[touch, 1] = end[touch, 1], end[touch, 1]
        sequence = numpy.broadcast_to(numpy.arange(len(begin))[:, None], begin.shape)
        some = begin < end
        return Pieces(sequence[some], begin[some], end[some])

    def runs(self, rank: int) -> "Runs":
        """The runs of a rank by numbers: two that touch are one, also of two sequences."""
        pieces = self.pieces(rank)
        first = self.starts[pieces.sequence]
        begin, end = union(first + pieces.begin, first + pieces.end)
        return Runs(begin, end, numpy.cumsum(end - begin) - (end - begin))

    def index(self, rank: int) -> numpy.ndarray:
        """int64, the numbers of the tokens of a rank, which ascend."""
        pieces = self.pieces(rank)
        first = self.starts[pieces.sequence]
        return ranges(first + pieces.begin, first + pieces.end)

    def positions(self, rank: int) -> numpy.ndarray:
        """int64, the positions of the tokens of a rank in their sequences."""
        pieces = self.pieces(rank)
        return ranges(pieces.begin, pieces.end)

    def seen(self, pieces: Pieces, band: Band) -> Pieces:
        """The keys that the queries of each piece see, as pieces that may overlap."""
        lengths = self.lengths[pieces.sequence]
        begin, end = numpy.zeros_like(pieces.begin), lengths
        if band.left is not None:
            begin = numpy.maximum(0, pieces.begin - band.left) // band.step * band.step
        if band.right is not None:
            end = numpy.minimum(lengths, pieces.end + band.right)
        return Pieces(pieces.sequence, begin, end)

    def work(self, rank: int, band: Band) -> int:
        """The pairs of a query and a key that it sees, of the queries of a rank."""
        pieces = self.pieces(rank)
        length = numpy.repeat(self.lengths[pieces.sequence], pieces.end - pieces.begin)
        position = ranges(pieces.begin, pieces.end)
        first = numpy.zeros_like(position), position - (band.left or 0)
        last = length, position + (band.right or 0) + 1
        begin = numpy.maximum(0, first[band.left is not None])
        return int((numpy.minimum(length, last[band.right is not None]) - begin).sum())


def ranges(begin: numpy.ndarray, end: numpy.ndarray) -> numpy.ndarray:
    """The integers of all ranges [begin, end), one range after another."""
    sizes = end - begin
    before = numpy.cumsum(sizes) - sizes
    return numpy.arange(sizes.sum()) + numpy.repeat(begin - before, sizes)


def union(begin: numpy.ndarray, end: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The ranges [begin, end), which ascend by both, without overlap: those that touch are one."""
    if len(begin) == 0:
        return begin, end
    apart = begin[1:] > numpy.maximum.accumulate(end)[:-1]
    first = numpy.concatenate([[True], apart])
    last = numpy.concatenate([apart, [True]])
    return begin[first], numpy.maximum.accumulate(end)[last]
