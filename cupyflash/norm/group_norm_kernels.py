"""GroupNorm with an activation: which kernel, and those that have a group in registers."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ..kernel_config import ITEM_SIZE, Capability, KernelConfig, has_clusters, weight_dtypes
from .group_norm_ring import CAPABILITY, GroupNormBwdRing, GroupNormFwdRing
from .params import GroupNormBwdParams, GroupNormFwdParams
from .row_configs import block_threads, vector_width
from .three_steps import (
    GroupNormBwdSplit,
    GroupNormFwdSplit,
    Kind,
    backward_last,
    backward_split,
    forward_last,
    forward_split,
)

ACTIVATIONS = ("none", "silu", "mish", "gelu", "gelu_tanh")  # as in activation.cuh
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
# And of the backward (blocks of a cluster, threads of a block's part of a group, loads of a thread,
# threads of a block, blocks of a multiprocessor).
BACKWARD_RINGS = (
    *((1, 32, 1, 512, 2), (1, 32, 2, 512, 1), (1, 32, 4, 256, 2), (1, 64, 4, 64, 8)),
    *((1, 128, 4, 128, 4), (1, 256, 4, 256, 2), (1, 256, 5, 256, 2), (1, 256, 10, 256, 2)),
    *((2, 256, 10, 256, 2), (4, 256, 10, 256, 2), (8, 256, 10, 256, 2)),
)
HALVES_TILES = 6  # of the tiles and of the backward's rings, for channels of 8 bytes
ELEMENT_TILES = ((32, 8, 6), (128, 8, 4), (512, 8, 1))  # where a thread reads element by element


class OneStepConfig(KernelConfig):
    """A kernel in which ``row_threads`` threads have a group in registers, channels first.

    Attributes:
        weight: dtype of weight and bias.
        cluster: blocks that share a group, with ``row_threads`` threads each.
        loads: packs of a thread.
        vector: elements of a pack.
        blocks: of a multiprocessor at a time.
        takes_turns: whether a block has its group of several samples, one after the other.
    """

    takes_turns: ClassVar[bool] = False

    cluster: int
    row_threads: int
    loads: int
    vector: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block: one group, or several that each have a warp or less."""
        return block_threads(self.row_threads)

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return self.threads // self.row_threads

    @property
    def size(self) -> int:
        """Elements of the largest group."""
        return self.cluster * self.row_threads * self.loads * self.vector


@dataclasses.dataclass(frozen=True)
class GroupConfig(OneStepConfig):
    """A block has one group or several.

    Attributes:
        layout: "first": a pack is of one channel; "halves": of two.
    """

    cluster: ClassVar[int] = 1

    dtype: str
    weight: str
    activation: str
    layout: str
    row_threads: int
    loads: int
    vector: int
    blocks: int


class GroupNormFwd(GroupConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd.cu"
    params: ClassVar[type[GroupNormFwdParams]] = GroupNormFwdParams


class GroupNormBwd(GroupConfig):
    """Backward."""

    takes_turns: ClassVar[bool] = True
    source: ClassVar[str] = "norm/group_norm_bwd.cu"
    params: ClassVar[type[GroupNormBwdParams]] = GroupNormBwdParams


@dataclasses.dataclass(frozen=True)
class GroupNormFwdSm90(OneStepConfig):
    """Forward: a warp has a group, or several, of one sample after the other.

    Attributes:
        layout: as in `GroupConfig`.
        places: samples that a warp has in shared memory.
    """

    cluster: ClassVar[int] = 1
    takes_turns: ClassVar[bool] = True
    source: ClassVar[str] = "norm/group_norm_fwd_sm90.cu"
    params: ClassVar[type[GroupNormFwdParams]] = GroupNormFwdParams

    dtype: str
    weight: str
    activation: str
    layout: str
    row_threads: int
    loads: int
    vector: int
    places: int
    num_threads: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_threads

    @property
    def shared_memory(self) -> int:
        """Of the samples."""
        return 16 * self.places * self.loads * self.num_threads


@dataclasses.dataclass(frozen=True)
class GroupNormFwdCluster(OneStepConfig):
    """Forward: the blocks of a cluster share a group, one after the other."""

    source: ClassVar[str] = "norm/group_norm_fwd_cluster.cu"
    params: ClassVar[type[GroupNormFwdParams]] = GroupNormFwdParams

    dtype: str
    weight: str
    activation: str
    cluster: int
    row_threads: int
    loads: int
    vector: int
    blocks: int

    @property
    def shared_memory(self) -> int:
        """Of the next group."""
        return 16 * self.loads * self.row_threads


@dataclasses.dataclass(frozen=True)
class GroupNormBwdSm90(OneStepConfig):
    """Backward: a group, or several, or the part of one that a block of a cluster has.

    Attributes:
        layout: as in `GroupConfig`.
    """

    takes_turns: ClassVar[bool] = True
    source: ClassVar[str] = "norm/group_norm_bwd_sm90.cu"
    params: ClassVar[type[GroupNormBwdParams]] = GroupNormBwdParams

    dtype: str
    weight: str
    activation: str
    layout: str
    cluster: int
    row_threads: int
    loads: int
    vector: int
    num_threads: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_threads

    @property
    def shared_memory(self) -> int:
        """Of x and dout, and of each pack two sums and the bias if registers are short."""
        sums = 12 * (2 if self.layout == "halves" else 1) * (self.loads * self.vector > 16)
        return (2 * 16 + sums) * self.num_threads * self.loads


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
            if aligned and capability == CAPABILITY:
                yield GroupNormFwdRing(*kind)
                yield GroupNormBwdRing(*kind)


def _forward_in_one(
    kind: Kind, aligned: bool, halves: bool, capability: Capability
) -> Iterator[OneStepConfig]:
    of_blocks = list(_of_blocks(GroupNormFwd, FORWARD_TILES, kind, aligned, halves))
    if not has_clusters(capability) or not (aligned or halves):
        yield from of_blocks
        return
    yield of_blocks[0]
    layout, vector = "halves" if halves else "first", vector_width(kind[0])
    for threads, loads, *ring in FORWARD_RINGS:
        yield GroupNormFwdSm90(*kind, layout, threads, loads, vector, *ring)
    yield from of_blocks[AFTER_RINGS:]
    for *tile, blocks in () if halves else FORWARD_CLUSTERS:
        yield GroupNormFwdCluster(*kind, *tile, vector, blocks)


def _backward_in_one(
    kind: Kind, aligned: bool, halves: bool, capability: Capability
) -> Iterator[OneStepConfig]:
    of_blocks = _of_blocks(GroupNormBwd, BACKWARD_TILES, kind, aligned, halves)
    if not has_clusters(capability) or not (aligned or halves):
        yield from of_blocks
        return
    yield next(of_blocks)
    layout, vector = "halves" if halves else "first", vector_width(kind[0])
    for *tile, threads, blocks in BACKWARD_RINGS[: HALVES_TILES if halves else None]:
        yield GroupNormBwdSm90(*kind, layout, *tile, vector, threads, blocks)


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
