"""GroupNorm with an activation: which kernel, with which tile."""

import itertools
from collections.abc import Iterator

from ..runtime.config import ITEM_SIZE, KernelConfig, vector_width, weight_dtypes
from ..runtime.gpu import Capability, architecture
from .group_norm_ring import GroupNormBwdRing, GroupNormFwdRing
from .one_step import (
    GroupConfig,
    GroupNormBwd,
    GroupNormBwdCluster,
    GroupNormBwdPipelined,
    GroupNormFwd,
    GroupNormFwdCluster,
    GroupNormFwdPipelined,
    OneStepConfig,
)
from .three_steps import (
    GroupNormBwdSplit,
    GroupNormFwdSplit,
    Kind,
    backward_last,
    backward_split,
    forward_last,
    forward_split,
)

ACTIVATIONS = ("none", "silu", "mish", "gelu", "gelu_tanh")
# (threads of a group, loads of a thread, blocks of a multiprocessor at a time), the smallest groups
# first; channels first.
FORWARD_TILES = (
    *((8, 1, 8), (32, 1, 8), (16, 4, 8), (32, 4, 8), (64, 4, 16), (128, 4, 8), (256, 4, 4)),
    *((256, 5, 4), (256, 8, 3), (256, 10, 4), (256, 20, 2)),
)
BACKWARD_TILES = (
    *((8, 1, 8), (32, 1, 8), (32, 2, 8), (32, 4, 4), (64, 4, 8), (128, 4, 4), (256, 4, 2)),
    *((256, 5, 2), (256, 10, 2), (512, 10, 1)),
)
# GPUs that have clusters take other tiles of the forward after the first: for small groups (threads
# of a group, loads of a thread, samples on their way, threads of a block, blocks of a
# multiprocessor), then those from AFTER_RINGS on, then (blocks of a cluster, the same of each).
FORWARD_RINGS = ((8, 2, 2, 128, 8), (16, 2, 2, 128, 8), (32, 2, 2, 128, 8), (32, 4, 1, 128, 4))
AFTER_RINGS = 4
FORWARD_CLUSTERS = (*((cluster, 256, 20, 2) for cluster in (2, 4, 8)), (8, 512, 20, 1))
# And of the backward: (threads of a group, loads of a thread, threads of a block, blocks of a
# multiprocessor), then clusters as above.
BACKWARD_RINGS = (
    *((32, 1, 512, 2), (32, 2, 512, 1), (32, 4, 256, 2), (64, 4, 64, 8)),
    *((128, 4, 128, 4), (256, 4, 256, 2), (256, 5, 256, 2), (256, 10, 256, 2)),
)
BACKWARD_CLUSTERS = (*((cluster, 256, 10, 2) for cluster in (2, 4, 8)), (8, 512, 8, 1))
HALVES_TILES = 6  # of the tiles and of the backward's rings, for channels of 8 bytes
ELEMENT_TILES = ((32, 8, 6), (128, 8, 4), (512, 8, 1))  # where a thread reads element by element


def forward(
    kind: Kind, size: int, aligned: bool, halves: bool, capability: Capability
) -> OneStepConfig | GroupNormFwdSplit:
    """The kernel for groups of ``size`` elements side by side, channels first."""
    fits = (x for x in _forward_in_one(kind, aligned, halves, capability) if size <= x.size)
    return next(fits, forward_split(kind, aligned))


def backward(
    kind: Kind, size: int, aligned: bool, halves: bool, capability: Capability
) -> OneStepConfig | GroupNormBwdSplit:
    """The kernel for groups of ``size`` elements side by side, channels first."""
    fits = (x for x in _backward_in_one(kind, aligned, halves, capability) if size <= x.size)
    return next(fits, backward_split(kind, aligned))


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Everything that GroupNorm can launch."""
    for dtype, aligned in itertools.product(ITEM_SIZE, (False, True)):
        for kind in itertools.product((dtype,), weight_dtypes(dtype), ACTIVATIONS):
            for in_one in (_forward_in_one, _backward_in_one):
                yield from in_one(kind, aligned, False, capability)
                if not aligned:
                    yield from in_one(kind, False, True, capability)
            for pick in (forward_split, backward_split, forward_last, backward_last):
                yield from pick(kind, aligned).steps()
            if aligned and architecture(capability).wgmma:
                yield GroupNormFwdRing(*kind)
                yield GroupNormBwdRing(*kind)


def _forward_in_one(
    kind: Kind, aligned: bool, halves: bool, capability: Capability
) -> Iterator[OneStepConfig]:
    of_blocks = list(_of_blocks(GroupNormFwd, FORWARD_TILES, kind, aligned, halves))
    if not architecture(capability).clusters or not (aligned or halves):
        yield from of_blocks
        return
    yield of_blocks[0]
    layout, vector = "halves" if halves else "first", vector_width(kind[0])
    for threads, loads, *ring in FORWARD_RINGS:
        yield GroupNormFwdPipelined(*kind, layout, threads, loads, vector, *ring)
    yield from of_blocks[AFTER_RINGS:]
    for *tile, blocks in () if halves else FORWARD_CLUSTERS:
        yield GroupNormFwdCluster(*kind, *tile, vector, blocks)


def _backward_in_one(
    kind: Kind, aligned: bool, halves: bool, capability: Capability
) -> Iterator[OneStepConfig]:
    of_blocks = _of_blocks(GroupNormBwd, BACKWARD_TILES, kind, aligned, halves)
    if not architecture(capability).clusters or not (aligned or halves):
        yield from of_blocks
        return
    yield next(of_blocks)
    layout, vector = "halves" if halves else "first", vector_width(kind[0])
    for *tile, threads, blocks in BACKWARD_RINGS[: HALVES_TILES if halves else None]:
        yield GroupNormBwdPipelined(*kind, layout, *tile, vector, threads, blocks)
    for *tile, blocks in () if halves else BACKWARD_CLUSTERS:
        yield GroupNormBwdCluster(*kind, *tile, vector, blocks)


def _of_blocks(
    config: type[GroupConfig], tiles: tuple, kind: Kind, aligned: bool, halves: bool
) -> Iterator[GroupConfig]:
    layout, vector = "first", vector_width(kind[0])
    if halves:
        layout, tiles = "halves", tiles[:HALVES_TILES]
    elif not aligned:
        tiles, vector = ELEMENT_TILES, 1
    for threads, loads, blocks in tiles:
        yield config(*kind, layout, threads, loads, vector, blocks)
