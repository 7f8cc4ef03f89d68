"""Which keys travel between which ranks, and where they lie when they have arrived.

Where most ranks need most keys, everybody gets all of them (an all-gather, and the gradients go
back by a reduce-scatter). Where a window needs few, each rank gets those that it needs (an
all-to-all, both ways).
"""

import dataclasses
import functools

import numpy

from ..ops.attention.score_text.capture import SEQUENCE
from .tokens import Band, Pieces, Tokens, ranges, union

MOST_TO_SEND = 0.5  # `share` up to which an all-to-all pays: attention hides an all-gather better


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """What one rank sends and receives.

    Attributes:
        everything: all ranks get all keys, those of each rank padded to ``rows`` rows.
        rows: the rows of each rank that an all-gather sends.
        send: int64, the local rows that are sent, in the order of the ranks that get them; of an
            all-gather every row, once.
        send_counts, receive_counts: rows for and from each rank, of an all-to-all.
        most: the most rows that arrive at a rank, the same number on all of them.
        numbers: int64, the number of the token in each row that arrives, -1 for padding.
    """

    everything: bool
    rows: int
    send: numpy.ndarray
    send_counts: list[int]
    receive_counts: list[int]
    most: int
    numbers: numpy.ndarray

    @property
    def kind(self) -> str:
        """The words for it in messages."""
        return "all keys" if self.everything else f"{sum(self.receive_counts)} keys"

    @functools.cached_property
    def sources(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """(the numbers that arrive, ascending; the row of each)."""
        order = numpy.argsort(self.numbers, kind="stable")
        order = order[numpy.count_nonzero(self.numbers < 0) :]
        return self.numbers[order], order

    def rows_of(self, numbers: numpy.ndarray) -> numpy.ndarray:
        """The rows in which tokens of these numbers arrive."""
        known, rows = self.sources
        return rows[numpy.searchsorted(known, numbers)]


def share(tokens: Tokens, band: Band) -> float:
    """The keys of other ranks that a rank sees, on average, as a share of all that others have."""
    needs = (needed(tokens, rank, band) for rank in range(tokens.ranks))
    wanted = sum(int((end - begin).sum()) for begin, end in needs)
    return (wanted - tokens.total) / max(1, (tokens.ranks - 1) * tokens.total)


def exchange(tokens: Tokens, rank: int, band: Band) -> Exchange:
    """The exchange of the keys that the queries of every rank see."""
    if tokens.ranks == 1 or share(tokens, band) > MOST_TO_SEND:
        return _everything(tokens, rank)
    needs = [needed(tokens, other, band) for other in range(tokens.ranks)]
    send = [_rows(tokens.pieces(rank), tokens, *need) for need in needs]
    begin, end = needs[rank]
    numbers = [
        tokens.index(other)[_rows(tokens.pieces(other), tokens, begin, end)]
        for other in range(tokens.ranks)
    ]
    return Exchange(
        everything=False,
        rows=0,
        send=numpy.concatenate(send),
        send_counts=[len(x) for x in send],
        receive_counts=[len(x) for x in numbers],
        most=max(int((end - begin).sum()) for begin, end in needs),
        numbers=numpy.concatenate(numbers),
    )


def _everything(tokens: Tokens, rank: int) -> Exchange:
    rows = int(tokens.counts.max(initial=0))
    numbers = numpy.full((tokens.ranks, rows), -1, numpy.int64)
    for other in range(tokens.ranks):
        index = tokens.index(other)
        numbers[other, : len(index)] = index
    send = numpy.arange(int(tokens.counts[rank]))
    return Exchange(True, rows, send, [], [], numbers.size, numbers.reshape(-1))


def needed(tokens: Tokens, rank: int, band: Band) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The ranges of numbers of the keys that the queries of a rank see."""
    seen = tokens.seen(tokens.pieces(rank), band)
    first = tokens.starts[seen.sequence]
    begin, end = first + seen.begin, first + seen.end
    some = begin < end
    return union(begin[some], end[some])


def _rows(
    pieces: Pieces, tokens: Tokens, begin: numpy.ndarray, end: numpy.ndarray
) -> numpy.ndarray:
    """The rows of a rank with these pieces whose numbers are in the ranges [begin, end)."""
    first = tokens.starts[pieces.sequence]
    return ranges(*(_rows_before(pieces, first, x) for x in (begin, end)))


def _rows_before(pieces: Pieces, first: numpy.ndarray, numbers: numpy.ndarray) -> numpy.ndarray:
    """How many tokens of a rank have a lower number than each of these."""
    sizes = pieces.end - pieces.begin
    ends = numpy.cumsum(sizes)
    if len(ends) == 0:
        return numpy.zeros_like(numbers)
    piece = numpy.searchsorted(first + pieces.begin, numbers, side="right") - 1
    inside = numpy.minimum(numbers - (first + pieces.begin)[piece], sizes[piece])
    return numpy.where(piece < 0, 0, (ends - sizes)[piece] + inside)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of attention of packed sequences: each piece of queries with the keys that it sees.

    Attributes:
        queries: int64, the rows of the queries of this rank, -1 for one that stands in front of a
            piece so that this begins at a multiple of the step of the band; None for all rows.
        first: int64 (pieces,), the number of the first key of each piece; the others follow it.
        cu_seqlens_q, cu_seqlens_k: int32 (pieces + 1).
        longest: the longest piece of queries, and of keys.
        places: int32 (3, pieces), the positions of the first query and the first key of each piece
            in its sequence, and the number of that.
        window: of the call, None for no limit. Its diagonal ends at the last key, which lies
            further right than the last query where queries see keys to their right.
    """

    queries: numpy.ndarray | None
    first: numpy.ndarray
    cu_seqlens_q: numpy.ndarray
    cu_seqlens_k: numpy.ndarray
    longest: tuple[int, int]
    places: numpy.ndarray
    window: tuple[int | None, int | None] | None

    @property
    def sequences(self) -> numpy.ndarray:
        """int32 (pieces,), the sequence of each piece."""
        return self.places[SEQUENCE]

    @property
    def keys(self) -> numpy.ndarray:
        """int64, the numbers of the keys, piece after piece."""
        return ranges(self.first, self.first + numpy.diff(self.cu_seqlens_k))


def calls(tokens: Tokens, rank: int, band: Band) -> list[Call]:
    """The calls that compute all queries of a rank: one, if all pieces can have the same window."""
    pieces = tokens.pieces(rank)
    seen = tokens.seen(pieces, band)
    shifts = seen.end - pieces.end if band.limited else numpy.zeros_like(seen.end)
    counts = pieces.end - pieces.begin
    rows = numpy.cumsum(counts) - counts
    before = pieces.begin % band.step
    pieces = pieces._replace(begin=pieces.begin - before)
    made = []
    for shift in numpy.unique(shifts):
        chosen = numpy.flatnonzero(shifts == shift)
        some, keys = (Pieces(*(y[chosen] for y in x)) for x in (pieces, seen))
        first = tokens.starts[keys.sequence]
        whole = len(chosen) == len(shifts) and not before.any()
        window = None
        if band.limited:
            left = None if band.left is None else band.left + int(shift)
            right = None if band.right is None else band.right - int(shift)
            window = left, right
        made.append(
            Call(
                None if whole else _rows_behind(rows[chosen], counts[chosen], before[chosen]),
                first + keys.begin,
                _cumulative(some),
                _cumulative(keys),
                (_longest(some), _longest(keys)),
                numpy.stack([some.begin, keys.begin, some.sequence]).astype(numpy.int32),
                window,
            )
        )
    return made


def _rows_behind(
    rows: numpy.ndarray, counts: numpy.ndarray, before: numpy.ndarray
) -> numpy.ndarray:
    """So many rows of each piece, from its first one on, and as many -1 in front of them."""
    numbers = ranges(rows - before, rows + counts)
    numbers[ranges(-before, counts) < 0] = -1
    return numbers


def _cumulative(pieces: Pieces) -> numpy.ndarray:
    return numpy.concatenate([[0], numpy.cumsum(pieces.end - pieces.begin)]).astype(numpy.int32)


def _longest(pieces: Pieces) -> int:
    return int((pieces.end - pieces.begin).max(initial=0))
