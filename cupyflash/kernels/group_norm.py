"""GroupNorm with an activation: in one step where registers or clusters hold it, else in three."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import ClassVar

from ..kernel_config import ITEM_SIZE, KernelConfig
from ..norm_params import ChannelTiling, GroupNormBwdParams, GroupNormFwdParams
from .norm import MIN_BLOCK_THREADS, vector_width, weight_dtypes

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
# (loads, blocks of a multiprocessor) of the kernels in three steps.
SPLIT_FORWARD, SPLIT_BACKWARD = (4, 4), (4, 2)
LAST_FORWARD, LAST_BACKWARD = (6, 3), (4, 2)
LAST_WAVES = 2  # of blocks, channels last
# Channels last, in one step: (threads, loads of a thread, blocks of a multiprocessor).
LAST_FORWARD_CLUSTERS, LAST_BACKWARD_CLUSTERS = ((256, 12, 3), (256, 22, 2)), ((256, 11, 2),)
CLUSTER, TILE_GROUPS = 8, 64  # as in channel_cluster.cuh
CLUSTER_RUN = 128  # bytes of a position side by side, beyond which more are no better
THREE_STEP_THREADS = 256
STEPS = ("collect", "sum_up", "apply")  # as in three_steps.cuh


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
        return self.row_threads if self.row_threads > 32 else MIN_BLOCK_THREADS

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


@dataclasses.dataclass(frozen=True)
class ThreeStepConfig(KernelConfig):
    """A kernel that reads twice, in three launches, one for each of `STEPS`."""

    dtype: str
    weight: str
    activation: str
    loads: int
    vector: int
    blocks: int
    step: str = STEPS[0]

    def steps(self) -> list["ThreeStepConfig"]:
        """The three kernels."""
        return [dataclasses.replace(self, step=step) for step in STEPS]

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREE_STEP_THREADS


class SplitConfig(ThreeStepConfig):
    """Groups beyond registers, channels first: a warp has a part of a channel."""

    @property
    def segment(self) -> int:
        """Positions of a warp."""
        return 32 * self.loads * self.vector

    def pieces(self, channels: int, positions: int) -> int:
        """Blocks that share a group."""
        return -(-channels * -(-positions // self.segment) // (self.threads // 32))


class LastConfig(ThreeStepConfig):
    """Channels last: a block has some positions of the channels of a tile."""

    def pieces(self, tiling: ChannelTiling, positions: int, most: int) -> int:
        """Blocks that share a sample, ``most`` if the sample is large enough."""
        rows = self.threads // -(-tiling.channels // self.vector)
        turns = -(-positions // (rows * self.loads))
        of_share = -(-turns // max(1, min(turns, most // tiling.tiles)))
        return tiling.tiles * -(-turns // of_share)


class GroupNormFwdSplit(SplitConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd_split.cu"
    params: ClassVar[type[GroupNormFwdParams]] = GroupNormFwdParams


class GroupNormBwdSplit(SplitConfig):
    """Backward."""

    source: ClassVar[str] = "norm/group_norm_bwd_split.cu"
    params: ClassVar[type[GroupNormBwdParams]] = GroupNormBwdParams


class GroupNormFwdLast(LastConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd_last.cu"
    params: ClassVar[type[GroupNormFwdParams]] = GroupNormFwdParams


class GroupNormBwdLast(LastConfig):
    """Backward."""

    source: ClassVar[str] = "norm/group_norm_bwd_last.cu"
    params: ClassVar[type[GroupNormBwdParams]] = GroupNormBwdParams


@dataclasses.dataclass(frozen=True)
class LastClusterConfig(KernelConfig):
    """Channels last: a cluster of blocks has the channels of a tile in shared memory (sm_90)."""

    tensors: ClassVar[int]

    dtype: str
    weight: str
    activation: str
    num_threads: int
    loads: int
    vector: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_threads

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory of a block in bytes."""
        return 16 * self.tensors * self.loads * self.threads

    def tiling(self, num_groups: int, channels: int, positions: int) -> ChannelTiling | None:
        """The largest tile that a cluster can hold, of groups that divide ``num_groups`` evenly."""
        for groups in range(min(num_groups, TILE_GROUPS), 0, -1):
            packs, rest = divmod(groups * channels, self.vector)
            if num_groups % groups or rest or packs > self.threads:
                continue
            turns = -(-positions // (self.threads // packs))
            if turns <= self.loads * CLUSTER:
                return ChannelTiling(num_groups // groups, groups, 1, groups * channels)
        return None


class GroupNormFwdLastSm90(LastClusterConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd_last_sm90.cu"
    params: ClassVar[type[GroupNormFwdParams]] = GroupNormFwdParams
    tensors: ClassVar[int] = 1


class GroupNormBwdLastSm90(LastClusterConfig):
    """Backward."""

    source: ClassVar[str] = "norm/group_norm_bwd_last_sm90.cu"
    params: ClassVar[type[GroupNormBwdParams]] = GroupNormBwdParams
    tensors: ClassVar[int] = 2


Kind = tuple[str, str, str]  # dtypes of x and of weight, activation
Capability = tuple[int, int]  # compute capability: (major, minor)


def forward(
    kind: Kind, size: int, aligned: bool, halves: bool, capability: Capability
) -> OneStepConfig | GroupNormFwdSplit:
    """The kernel for groups of ``size`` elements side by side, channels first."""
    fits = (x for x in _forward_in_one(kind, aligned, halves, capability) if size <= x.size)
    return next(fits, GroupNormFwdSplit(*kind, *_three_step(SPLIT_FORWARD, kind[0], aligned)))


def backward(
    kind: Kind, size: int, aligned: bool, halves: bool, capability: Capability
) -> OneStepConfig | GroupNormBwdSplit:
    """The kernel for groups of ``size`` elements side by side, channels first."""
    fits = (x for x in _backward_in_one(kind, aligned, halves, capability) if size <= x.size)
    return next(fits, GroupNormBwdSplit(*kind, *_three_step(SPLIT_BACKWARD, kind[0], aligned)))


def forward_last(kind: Kind, aligned: bool) -> GroupNormFwdLast:
    """The kernel for channels last."""
    return GroupNormFwdLast(*kind, *_three_step(LAST_FORWARD, kind[0], aligned))


def backward_last(kind: Kind, aligned: bool) -> GroupNormBwdLast:
    """The kernel for channels last."""
    return GroupNormBwdLast(*kind, *_three_step(LAST_BACKWARD, kind[0], aligned))


def in_cluster(
    direction: str, kind: Kind, num_groups: int, channels: int, positions: int
) -> tuple[LastClusterConfig, ChannelTiling] | None:
    """The kernel for channels last in one step, and its tiles; None if they do not fit."""
    found = [
        (x, x.tiling(num_groups, channels, positions)) for x in _last_clusters(direction, kind)
    ]
    whole = num_groups * channels * ITEM_SIZE[kind[0]]
    width = lambda x: min(whole, CLUSTER_RUN, x[1].channels * ITEM_SIZE[kind[0]])  # noqa: E731
    best = max((x for x in found if x[1]), key=width, default=None)
    return best if best and width(best) >= min(whole, CLUSTER_RUN // 2) else None


def has_clusters(capability: Capability) -> bool:
    """Whether the GPU has clusters, and shared memory enough."""
    return capability in ((9, 0), (10, 0), (10, 3))


def channel_tiling(num_groups: int, channels: int, vector: int) -> ChannelTiling | None:
    """Which channels a block has of ``num_groups`` groups; None if packs would cross tiles."""
    most = THREE_STEP_THREADS * vector
    step = vector // math.gcd(channels, vector)  # groups that end where a pack ends
    groups = min(num_groups, most // (channels * step) * step)
    if groups:
        return ChannelTiling(-(-num_groups // groups), groups, 1, groups * channels)
    if step > 1:
        return None
    width = -(-channels // -(-channels // most))
    width += -width % vector
    parts = -(-channels // width)
    return ChannelTiling(num_groups * parts, 1, parts, width)


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Everything that the five above can return."""
    for dtype, aligned in itertools.product(ITEM_SIZE, (False, True)):
        for kind in itertools.product((dtype,), weight_dtypes(dtype), ACTIVATIONS):
            for in_one in (_forward_in_one, _backward_in_one):
                yield from in_one(kind, aligned, False, capability)
                if not aligned:
                    yield from in_one(kind, False, True, capability)
            yield from GroupNormFwdSplit(*kind, *_three_step(SPLIT_FORWARD, dtype, aligned)).steps()
            yield from GroupNormBwdSplit(
                *kind, *_three_step(SPLIT_BACKWARD, dtype, aligned)
            ).steps()
            yield from forward_last(kind, aligned).steps()
            yield from backward_last(kind, aligned).steps()
            if aligned and has_clusters(capability):
                yield from _last_clusters("forward", kind)
                yield from _last_clusters("backward", kind)


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
    elif not (9, 0) <= capability < (12, 0):
        of_cluster = ()
    for threads, loads, blocks in of_block:
        yield block(*kind, layout, threads, loads, vector, blocks)
    for size, threads, loads, blocks in of_cluster:
        yield cluster(*kind, size, threads, loads, vector, blocks)


def _last_clusters(direction: str, kind: Kind) -> Iterator[LastClusterConfig]:
    forward = direction == "forward"
    config = GroupNormFwdLastSm90 if forward else GroupNormBwdLastSm90
    for threads, loads, blocks in LAST_FORWARD_CLUSTERS if forward else LAST_BACKWARD_CLUSTERS:
        yield config(*kind, threads, loads, vector_width(kind[0]), blocks)


def _three_step(tile: tuple[int, int], dtype: str, aligned: bool) -> tuple[int, int, int]:
    """(loads, vector, blocks)."""
    return tile[0], vector_width(dtype) if aligned else 1, tile[1]
