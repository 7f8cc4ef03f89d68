"""GroupNorm with an activation: which kernel, and those that have a group in registers."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ..kernel_config import ITEM_SIZE, Capability, KernelConfig, has_clusters, weight_dtypes
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
# first; channels first. GPUs that have clusters take those for larger groups: (blocks of a cluster,
# the same of each).
FORWARD_TILES = (
    *((8, 1, 8), (32, 1, 8), (16, 4, 8), (32, 4, 8), (64, 4, 16), (128, 4, 8), (256, 4, 4)),
    *((256, 5, 4), (256, 8, 3), (256, 10, 4), (256, 20, 2)),
)
BACKWARD_TILES = (
    *((8, 1, 8), (32, 1, 8), (32, 2, 8), (32, 4, 4), (64, 4, 8), (128, 4, 4), (256, 4, 2)),
    *((256, 5, 2), (256, 10, 2), (512, 10, 1)),
)
FORWARD_CLUSTERS = tuple((cluster, 256, 20, 2) for cluster in (2, 4, 8))
BACKWARD_CLUSTERS = tuple((cluster, 256, 10, 2) for cluster in (4, 8))
ROUNDS = 8  # samples that a block of the backward takes one after the other, at most
HALVES_TILES = 6  # of those tiles, for channels of 8 bytes
ELEMENT_TILES = ((32, 8, 6), (128, 8, 4), (512, 8, 1))  # where a thread reads element by element


class OneStepConfig(KernelConfig):
    """A kernel in which ``row_threads`` threads have a group in registers, channels first.

    Attributes:
        weight: dtype of weight and bias.
        cluster: blocks that share a group, with ``row_threads`` threads each.
        loads: packs of a thread.
        vector: elements of a pack.
        blocks: of a multiprocessor at a time.
    """

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

    source: ClassVar[str] = "norm/group_norm_bwd.cu"
    params: ClassVar[type[GroupNormBwdParams]] = GroupNormBwdParams


@dataclasses.dataclass(frozen=True)
class ClusterConfig(OneStepConfig):
    """The blocks of a cluster share a group."""

    dtype: str
    weight: str
    activation: str
    cluster: int
    row_threads: int
    loads: int
    vector: int
    blocks: int


class GroupNormFwdSm90(ClusterConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd_sm90.cu"
    params: ClassVar[type[GroupNormFwdParams]] = GroupNormFwdParams


class GroupNormBwdSm90(ClusterConfig):
    """Backward."""

    source: ClassVar[str] = "norm/group_norm_bwd_sm90.cu"
    params: ClassVar[type[GroupNormBwdParams]] = GroupNormBwdParams


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


def _forward_in_one(
    kind: Kind, aligned: bool, halves: bool, capability: Capability
) -> Iterator[OneStepConfig]:
    tiles = FORWARD_TILES, FORWARD_CLUSTERS
    return _in_one(GroupNormFwd, GroupNormFwdSm90, tiles, kind, aligned, halves, capability)


def _backward_in_one(
    kind: Kind, aligned: bool, halves: bool, capability: Capability
) -> Iterator[OneStepConfig]:
    tiles = BACKWARD_TILES, BACKWARD_CLUSTERS
    return _in_one(GroupNormBwd, GroupNormBwdSm90, tiles, kind, aligned, halves, capability)


def _in_one(
    block: type[GroupConfig],
    cluster: type[ClusterConfig],
    tiles: tuple[tuple, tuple],
    kind: Kind,
    aligned: bool,
    halves: bool,
    capability: Capability,
) -> Iterator[OneStepConfig]:
    of_block, of_cluster = tiles
    layout, vector = "first", vector_width(kind[0])
    if halves:
        layout, of_block, of_cluster = "halves", of_block[:HALVES_TILES], ()
    elif not aligned:
        of_block, of_cluster, vector = ELEMENT_TILES, (), 1
    elif not has_clusters(capability):
        of_cluster = ()
    for threads, loads, blocks in of_block:
        yield block(*kind, layout, threads, loads, vector, blocks)
    for size, threads, loads, blocks in of_cluster:
        yield cluster(*kind, size, threads, loads, vector, blocks)
