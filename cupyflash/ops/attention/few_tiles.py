"""The choice of a tile, and of the blocks that share its keys, where tiles are few.

With many tiles, all multiprocessors are busy to the end, and the tile with the fastest step wins
(the table of a backend). With few, what counts is how many tiles one after the other the busiest
multiprocessor has: smaller tiles, or keys divided over blocks, may serve though each step takes
longer. A model of the time decides; its figures are in bench/notes/short_sequences.md.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from ...runtime.gpu import Card
from . import sharing
from .problem import Problem

# More tiles than these for each multiprocessor are many.
MANY = 4
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # blocks that may share the keys of a tile
# The time of 128 keys by the rows of a tile, relative to 128 rows. 64 rows take more than half of
# it, because one warpgroup alone computes no products while it computes its softmax.
STEP = {64: 0.7, 128: 1.0, 192: 1.3}
# Storing the parts of an output and combining them takes MERGE such units of time, and one more for
# every ROWS_OF_A_UNIT rows of all parts.
MERGE, ROWS_OF_A_UNIT = 3.0, 8192


class Choice(NamedTuple):
    """A kernel, whose tile has ``block_m`` queries and ``block_n`` keys, and the blocks a tile."""

    config: Any
    splits: int


def choose(configs: Iterable[Any], problem: Problem, card: Card) -> Choice:
    """The kernel and the splits of the least time; the first kernel unless its tiles are few.

    Args:
        configs: the choice for many tiles first, the smallest tile last. Blocks share the keys of
            that one alone, which saves kernels.
    """
    configs = list(configs)
    if sharing.num_tiles(configs[0], problem) > MANY * card.multiprocessors:
        return Choice(configs[0], 1)
    choices = [*(Choice(x, 1) for x in configs), *(Choice(configs[-1], x) for x in SPLITS)]
    visits = {x: key_tiles(problem, x.block_m, x.block_n) for x in configs}
    return min(choices, key=lambda x: _time(x, visits[x.config], problem, card))


def _time(choice: Choice, visits: list[int], problem: Problem, card: Card) -> float:
    """The time of a choice in the unit of `STEP`; infinite if its blocks have to wait."""
    (config, splits), at_once = choice, card.multiprocessors
    tiles = sharing.num_tiles(config, problem)
    if splits > 1 and tiles * splits > at_once:  # each of them must have a multiprocessor
        return float("inf")
    steps = [-(-x // splits) for x in visits]
    longest = max(steps, default=0)
    if problem.has_own_lengths or min(steps, default=0) == longest:
        busiest = -(-tiles * splits // at_once) * longest
    else:  # the longest tiles come first, so that the short ones fill what is left
        busiest = max(longest, sum(steps) * tiles * splits / len(steps) / at_once)
    walk = busiest * STEP[config.block_m] * config.block_n / 128
    if splits == 1:
        return walk
    return walk + MERGE + splits * math.prod(problem.lse_shape) / ROWS_OF_A_UNIT


def key_tiles(problem: Problem, block_m: int, block_n: int) -> list[int]:
    """How many key tiles each tile of queries of one head visits: `key_tiles` of block_info.cuh.

    Sequences with lengths of their own count as the longest.
    """
    shape = problem.shape
    diagonal = 0 if shape.top_left else shape.seqlen_k - shape.seqlen_q
    counts = []
    for row in range(0, shape.seqlen_q, block_m):
        last = min(row + block_m, shape.seqlen_q) - 1
        begin = max(0, row + diagonal - shape.window_left)
        end = min(shape.seqlen_k, last + diagonal + shape.window_right + 1)
        counts.append(max(0, -(-max(0, end) // block_n) - begin // block_n))
    return counts
