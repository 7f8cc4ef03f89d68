"""Which packed sequences stay whole, and where; arithmetic that is the same on all ranks.

Few long sequences are divided among all ranks, and each of the others is placed on one, longest
first, where most room is left. So the keys of short ones do not travel.
"""

import heapq
from collections.abc import Sequence

import numpy

DIVIDED = -1


def placed(lengths: numpy.ndarray, places: int, slack: float) -> numpy.ndarray:
    """int64 (sequences,), the place where each sequence stays whole, or `DIVIDED`.

    The longest sequences are divided, as few as let all places have at most (1 + slack) times the
    mean of the tokens, and of the pairs of a query and a key of its sequence.
    """
    order = numpy.argsort(-lengths, kind="stable")
    tokens = lengths[order].tolist()
    pairs = [n * (n + 1) // 2 for n in tokens]
    most = [(1 + slack) * sum(x) / places for x in (tokens, pairs)]
    found = numpy.full(len(lengths), DIVIDED, numpy.int64)
    divided, work = 0, 0
    for count, (size, own) in enumerate(zip(tokens, pairs)):
        even = -(-divided // places), work / places  # what each place has of those that are divided
        if even[0] + size <= most[0] and even[1] + own <= most[1]:
            whole = _filled(tokens[count:], pairs[count:], even, most, places)
            if whole is not None:
                found[order[count:]] = whole
                return found
        divided, work = divided + size, work + own
    return found


def _filled(
    tokens: Sequence[int],
    pairs: Sequence[int],
    even: tuple[float, float],
    most: Sequence[float],
    places: int,
) -> list[int] | None:
    """The place of each sequence, the least full one that has room; None if one has no room."""
    filled = [(_load(even, most), place, *even) for place in range(places)]
    found = []
    for size, own in zip(tokens, pairs):
        full = []
        while filled:
            load, place, *used = heapq.heappop(filled)
            room = used[0] + size, used[1] + own
            if room[0] <= most[0] and room[1] <= most[1]:
                break
            full.append((load, place, *used))
        else:
            return None
        found.append(place)
        for entry in (*full, (_load(room, most), place, *room)):
            heapq.heappush(filled, entry)
    return found


def _load(used: Sequence[float], most: Sequence[float]) -> float:
    """How full a place is, by what it has most of."""
    return max(x / limit if limit else 0.0 for x, limit in zip(used, most))
