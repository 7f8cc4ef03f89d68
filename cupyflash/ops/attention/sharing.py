"""Rules that share the tiles of a pass out among the multiprocessors of a card.

Pure functions of a configuration, a problem and a card: how many blocks there are, how many of them
divide the keys of a tile or the queries of a key head, and how many heads run side by side.

`choose` finds the tile of a forward. With many tiles, all multiprocessors are busy to the end, and
the tile with the fastest step wins (the table of a backend). With few, what counts is how many
tiles one after the other the busiest multiprocessor has: smaller tiles, or keys divided over
blocks, may serve though each step takes longer. A model of the time decides; its figures are in
bench/notes/short_sequences.md.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from ...runtime.config import KernelConfig
from ...runtime.gpu import Card
from .problem import Problem

# A backward launch with at most FEW_TILES tiles for each multiprocessor has few. A section of its
# heads should then have SECTION_TILES for each.
FEW_TILES, SECTION_TILES = 8, 3
# A block should have at least so many query rows. With fewer, the sums of dK and dV that it leaves
# in float32 take longer than it saves.
MIN_SHARE_ROWS = 1024
# Part of L2 for the keys and values of the heads that run together (tile_order.cuh); the rest
# is left to queries and outputs.
SECTION_L2_FRACTION = 0.6
# A section has at most so many tiles of queries, or of keys, for each multiprocessor. So many are
# enough for the launch to end evenly; more would leave less of what they share in the L2 cache.
MOST_SECTION_TILES = {"q": 2.7, "k": 1.6}
# Where blocks that add in turns all begin with the last queries, at least so many heads run side by
# side, because the blocks of fewer heads would wait for each other.
TURN_HEADS = 8
# With the mask of a text, at least so many heads run side by side. Of one head alone, the longest
# tile may take longer than a multiprocessor's share of all its tiles, and the launch ends with it.
MASK_HEADS = 2
# For `choose`, more tiles than these for each multiprocessor are many.
MANY = 4
SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # blocks that may share the keys of a tile
# The time of 128 keys by the rows of a tile, relative to 128 rows. 64 rows take more than half of
# it, because one warpgroup alone computes no products while it computes its softmax.
STEP = {64: 0.7, 128: 1.0, 192: 1.3}
# A second tile on the same multiprocessor takes this time beside that of its steps.
NEXT_TILE = 1.5
# Storing the parts of an output and combining them takes MERGE such units of time, and one more for
# every ROWS_OF_A_UNIT rows of all parts.
MERGE, ROWS_OF_A_UNIT = 3.0, 8192


def tiles_of_head(config: KernelConfig, problem: Problem) -> int:
    """Returns the tiles of one head in all sequences together, an upper bound."""
    of_keys, shape = config.tiles_of == "k", problem.shape
    rows = problem.total_k if of_keys else problem.total_q
    if rows is None:
        return -(-(shape.seqlen_k if of_keys else shape.seqlen_q) // config.tile_rows) * shape.batch
    return rows // config.tile_rows + shape.batch


def num_tiles(config: KernelConfig, problem: Problem, shares: int = 1) -> int:
    """Tiles of a kernel; where sequences have lengths of their own, at most.

    Args:
        shares: of the query heads of a key head, each of which has the tiles of keys.
    """
    shape = problem.shape
    heads = shape.heads_kv * shares if config.tiles_of == "k" else shape.heads_q
    return heads * tiles_of_head(config, problem)


def group_shares(config: KernelConfig, problem: Problem, card: Card, *, divides_rows: bool) -> int:
    """The number of blocks that divide the work of a key head in the backward pass.

    One, unless the tiles of keys are too few for the multiprocessors. Then so many that each
    multiprocessor gets about five, as long as each block has a query head; under a mask, where the
    longest tiles come first, two heads if that leaves each multiprocessor about two tiles. If one
    head for each block still leaves multiprocessors idle, blocks may divide the rows of a query
    head as well.

    Args:
        divides_rows: whether the kernel can do so.
    """
    shape, at_once = problem.shape, card.multiprocessors
    tiles = num_tiles(config, problem)
    group = shape.heads_q // shape.heads_kv
    if tiles >= 3 * at_once:
        return 1
    heads_of_a_share = max(1, group * tiles // (5 * at_once))
    if group * tiles > 3.8 * at_once and problem.features.masked:
        heads_of_a_share = max(2, heads_of_a_share)
    shares = -(-group // heads_of_a_share)
    parts = min(at_once // max(1, shares * tiles), shape.seqlen_q // MIN_SHARE_ROWS)
    return shares * parts if divides_rows and shares == group and parts > 1 else shares


def least_side_by_side(config: KernelConfig, problem: Problem, card: Card, shares: int) -> int:
    """The least number of heads of tile_order.cuh that the backward pass has side by side.

    Where a multiprocessor has few tiles, the last section must not end with a long tile in each
    head, which weighs more than queries that miss the L2 cache.
    """
    shape, at_once = problem.shape, card.multiprocessors
    heads, tiles = shape.heads_kv * shares * shape.batch, num_tiles(config, problem, shares)
    if tiles > FEW_TILES * at_once:
        return 1
    return min(heads, -(-SECTION_TILES * at_once * heads // max(1, tiles)))


def heads_per_section(
    config: KernelConfig,
    problem: Problem,
    card: Card,
    *,
    tensors: int,
    shares: int = 1,
    least: int = 1,
    even_end: bool = False,
    in_turns: bool = False,
    walks_up: bool = False,
) -> int:
    """The number of heads that run side by side, longest tiles first: see tile_order.cuh.

    Only tiles of unequal length need it, under a causal mask without a window to the left or
    under the mask of a text; and blocks that add in turns (``in_turns``), where those of one head
    wait for each other.

    Args:
        tensors: of whose rows of one head its blocks read all again and again; one in float32
            counts twice.
        shares: of the query heads of a key head.
        least: so many side by side even if the L2 cache has no room for them.
        even_end: no more than `MOST_SECTION_TILES` allows.
        walks_up: blocks walk from the first query to the last.
    """
    shape = problem.shape
    if not (problem.is_causal or in_turns or config.tiles):
        return 1
    of_keys = config.tiles_of == "k"
    heads = shape.batch * (shape.heads_kv * shares if of_keys else shape.heads_q)
    rows = shape.seqlen_q if of_keys else shape.seqlen_k
    head_bytes = max(1, rows * shape.head_dim * tensors * 2)
    fitting = max(1, min(heads, int(SECTION_L2_FRACTION * card.l2_bytes / head_bytes)))
    if even_end:
        most = MOST_SECTION_TILES[config.tiles_of] * card.multiprocessors
        if not of_keys:
            most *= shape.heads_q // shape.heads_kv  # their heads share keys and values
        fitting = max(1, min(fitting, int(most * heads / num_tiles(config, problem, shares))))
    if in_turns and not walks_up:
        least = max(least, min(heads, TURN_HEADS))
    if config.tiles:
        least = max(least, min(heads, MASK_HEADS))
    fitting = max(fitting, least)
    # A power of two, so that sections of the usual head counts come out even, which is worth 7 %.
    power = 1 << (fitting.bit_length() - 1)
    if heads % power and heads % (power // 2) == 0:
        power //= 2
    return power if power >= least else -(-heads // -(-heads // fitting))


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
    if num_tiles(configs[0], problem) > MANY * card.multiprocessors:
        return Choice(configs[0], 1)
    choices = [*(Choice(x, 1) for x in configs), *(Choice(configs[-1], x) for x in SPLITS)]
    visits = {x: key_tiles(problem, x.block_m, x.block_n) for x in configs}
    return min(choices, key=lambda x: _time(x, visits[x.config], problem, card))


def _time(choice: Choice, visits: list[int], problem: Problem, card: Card) -> float:
    """The time of a choice in the unit of `STEP`; infinite if its blocks have to wait."""
    (config, splits), at_once = choice, card.multiprocessors
    tiles = num_tiles(config, problem)
    if splits > 1 and tiles * splits > at_once:  # each of them must have a multiprocessor
        return float("inf")
    unit = STEP[config.block_m] * config.block_n / 128
    steps = [-(-x // splits) * unit for x in visits]
    longest = max(steps, default=0)
    if problem.has_own_lengths or min(steps, default=0) == longest:
        walk = -(-tiles * splits // at_once) * (longest + NEXT_TILE) - NEXT_TILE
    else:  # the longest tiles come first, so that the short ones fill what is left
        mean = sum(steps) / len(steps) + NEXT_TILE
        walk = max(longest, mean * tiles * splits / at_once - NEXT_TILE)
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
