"""The choice of a tile, and of the blocks that share its keys, where tiles are few."""

import random

import numpy
import pytest
from problems import HOPPER, problem_of

from cupyflash.ops.attention import sharing
from cupyflash.ops.attention.sm90.forward import forward_kernel, forward_kernels
from cupyflash.runtime.structs import header


def configs(problem):
    """The kernels of the forward on Hopper that do not share keys, the one for many tiles first."""
    kernels = forward_kernels(problem.kind(HOPPER.capability))
    return [x for x in kernels if not getattr(x, "split", True)]


def chosen(problem, card=HOPPER):
    config, splits = sharing.choose(configs(problem), problem, card)
    return config.block_m, splits


@pytest.mark.parametrize(
    "heads, queries, keys, head_dim, causal, expected",
    [
        (16, 512, 512, 64, False, (64, 1)),  # 128 tiles of 64 queries: one for each multiprocessor
        (32, 256, 256, 128, True, (64, 1)),
        (16, 2048, 2048, 64, False, (128, 1)),  # two tiles of 192 rows one after the other
        (32, 512, 512, 64, True, (128, 1)),  # two of 64 rows one after the other take longer
        (64, 4096, 4096, 64, False, (192, 1)),  # many
        (8, 64, 8192, 128, False, (64, 16)),
        (1, 8192, 8192, 64, False, (64, 1)),
        (1, 1, 1, 128, False, (64, 1)),
        (4, 300, 0, 128, False, (128, 1)),  # no keys: all are equal
    ],
)
def test_choice(heads, queries, keys, head_dim, causal, expected):
    problem = problem_of(1, (heads, heads), queries, keys, head_dim, causal=causal)
    assert chosen(problem) == expected


def test_a_tuned_tile_is_kept():
    problem = problem_of(1, (16, 16), 512, 512, 64)
    tile = forward_kernel(problem.kind((9, 0)), (192, 80, 2, 3))
    assert sharing.choose([tile], problem, HOPPER).config == tile


def test_the_kernel_that_combines_takes_all_splits():
    combine = header("attention/sm90/flash_fwd_combine_sm90.cu")
    assert max(sharing.SPLITS) == combine.MAX_SPLITS


def test_every_block_of_a_shared_tile_has_a_multiprocessor():
    """The kernel that shares keys takes one tile a block, and has no counter of tiles."""
    source = random.Random(0)
    shared = 0
    for _ in range(300):
        card = HOPPER._replace(multiprocessors=source.choice((20, 78, 132)))
        heads = source.choice((1, 2, 8, 40))
        queries, keys = (round(2 ** source.uniform(0, 13)) for _ in range(2))
        problem = problem_of(source.choice((1, 3)), (heads, heads), queries, keys, 128)
        config, splits = sharing.choose(configs(problem), problem, card)
        tiles = -(-queries // config.block_m) * heads * problem.shape.batch
        assert splits == 1 or tiles * splits <= card.multiprocessors
        shared += splits > 1
    assert shared > 20


def test_tiles_that_are_counted_are_those_with_a_visible_key():
    """Queries that see no key may visit one tile."""
    source = random.Random(1)
    for _ in range(200):
        queries, keys = source.randrange(1, 400), source.randrange(1, 400)
        window = source.choice((None, (source.randrange(200), source.randrange(200))))
        causal = source.choice((False, True, "top-left"))
        problem = problem_of(1, (1, 1), queries, keys, 64, causal=causal, window=window)
        shape = problem.shape
        diagonal = 0 if shape.top_left else keys - queries
        row, key = numpy.ogrid[:queries, :keys]
        distance = key - row - diagonal
        seen = (-shape.window_left <= distance) & (distance <= shape.window_right)
        expected = [
            len({k // 128 for k in numpy.flatnonzero(seen[m : m + 64].any(0))})
            for m in range(0, queries, 64)
        ]
        found = sharing.key_tiles(problem, 64, 128)
        assert all(x == y or x <= 1 and y == 0 for x, y in zip(found, expected, strict=True))
