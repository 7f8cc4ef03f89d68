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
# first; channels first.
FORWARD_TILES = (
    *((8, 1, 8), (32, 1, 8), (16, 4, 8), (32, 4, 8), (64, 4, 16), (128, 4, 8), (256, 4, 4)),
    *((256, 5, 4), (256, 8, 3), (256, 10, 3), (256, 20, 2), (512, 16, 1)),
)
BACKWARD_TILES = (
    *((8, 1, 8), (32, 1, 8), (32, 2, 8), (32, 4, 4), (64, 4, 8), (128, 4, 4), (256, 4, 2)),
    *((256, 5, 2), (256, 10, 2), (512, 10, 1)),
)
HALVES_TILES = 6  # of those tiles, for channels of 8 bytes
ELEMENT_TILES = ((32, 8, 6), (128, 8, 4), (512, 8, 1))  # where a thread reads element by element
# (loads, blocks of a multiprocessor) of the kernels in three steps.
SPLIT_FORWARD, SPLIT_BACKWARD = (4, 4), (4, 2)
LAST_FORWARD, LAST_BACKWARD = (6, 3), (4, 2)
LAST_WAVES = 2  # of blocks, channels last
# Channels last, in one step: (threads, loads of a thread, blocks of a multiprocessor).
CLUSTER_FORWARD, CLUSTER_BACKWARD = ((256, 12, 3), (256, 22, 2)), ((256, 11, 2),)
CLUSTER, TILE_GROUPS = 8, 64  # as in channel_cluster.cuh
CLUSTER_RUN = 128  # bytes of a position side by side, beyond which more are no better
THREE_STEP_THREADS = 256
STEPS = ("collect", "sum_up", "apply")  # as in three_steps.cuh


@dataclasses.dataclass(frozen=True)
class GroupConfig(KernelConfig):
    """A kernel in which ``row_threads`` threads have a group in registers, channels first.

    Attributes:
        weight: dtype of weight and bias.
        layout: "first": a pack of ``vector`` elements is of one channel; "halves": of two.
        loads: packs of a thread.
        blocks: of a multiprocessor at a time.
    """

    dtype: str
    weight: str
    activation: str
    layout: str
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
        return self.row_threads * self.loads * self.vector


class GroupNormFwd(GroupConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd.cu"
    params: ClassVar[type[GroupNormFwdParams]] = GroupNormFwdParams


class GroupNormBwd(GroupConfig):
    """Backward."""

    source: ClassVar[str] = "norm/group_norm_bwd.cu"
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
class ClusterConfig(KernelConfig):
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


class GroupNormFwdCluster(ClusterConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd_cluster.cu"
    params: ClassVar[type[GroupNormFwdParams]] = GroupNormFwdParams
    tensors: ClassVar[int] = 1


class GroupNormBwdCluster(ClusterConfig):
    """Backward."""

    source: ClassVar[str] = "norm/group_norm_bwd_cluster.cu"
    params: ClassVar[type[GroupNormBwdParams]] = GroupNormBwdParams
    tensors: ClassVar[int] = 2


Kind = tuple[str, str, str]  # dtypes of x and of weight, activation


def forward(kind: Kind, size: int, aligned: bool, halves: bool) -> GroupNormFwd | GroupNormFwdSplit:
    """The kernel for groups of ``size`` elements, channels first."""
    fits = (x for x in _in_registers(GroupNormFwd, kind, aligned, halves) if size <= x.size)
    return next(fits, GroupNormFwdSplit(*kind, *_three_step(SPLIT_FORWARD, kind[0], aligned)))


def backward(
    kind: Kind, size: int, aligned: bool, halves: bool
) -> GroupNormBwd | GroupNormBwdSplit:
    """The kernel for groups of ``size`` elements, channels first."""
    fits = (x for x in _in_registers(GroupNormBwd, kind, aligned, halves) if size <= x.size)
    return next(fits, GroupNormBwdSplit(*kind, *_three_step(SPLIT_BACKWARD, kind[0], aligned)))


def forward_last(kind: Kind, aligned: bool) -> GroupNormFwdLast:
    """The kernel for channels last."""
    return GroupNormFwdLast(*kind, *_three_step(LAST_FORWARD, kind[0], aligned))


def backward_last(kind: Kind, aligned: bool) -> GroupNormBwdLast:
    """The kernel for channels last."""
    return GroupNormBwdLast(*kind, *_three_step(LAST_BACKWARD, kind[0], aligned))


def in_cluster(
    direction: str, kind: Kind, num_groups: int, channels: int, positions: int
) -> tuple[ClusterConfig, ChannelTiling] | None:
    """The kernel for channels last in one step, and its tiles; None if they do not fit."""
    found = [(x, x.tiling(num_groups, channels, positions)) for x in _clusters(direction, kind)]
    whole = num_groups * channels * ITEM_SIZE[kind[0]]
    width = lambda x: min(whole, CLUSTER_RUN, x[1].channels * ITEM_SIZE[kind[0]])  # noqa: E731
    best = max((x for x in found if x[1]), key=width, default=None)
    return best if best and width(best) >= min(whole, CLUSTER_RUN // 2) else None


def has_clusters(capability: tuple[int, int]) -> bool:
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


def configurations(capability: tuple[int, int]) -> Iterator[KernelConfig]:
    """Everything that the five above can return."""
    for dtype, aligned in itertools.product(ITEM_SIZE, (False, True)):
        for kind in itertools.product((dtype,), weight_dtypes(dtype), ACTIVATIONS):
            for config in (GroupNormFwd, GroupNormBwd):
                yield from _in_registers(config, kind, aligned, False)
                if not aligned:
                    yield from _in_registers(config, kind, False, True)
            yield from forward(kind, 2**31, aligned, False).steps()
            yield from backward(kind, 2**31, aligned, False).steps()
            yield from forward_last(kind, aligned).steps()
            yield from backward_last(kind, aligned).steps()
            if aligned and has_clusters(capability):
                yield from _clusters("forward", kind)
                yield from _clusters("backward", kind)


def _in_registers(
    config: type[GroupConfig], kind: Kind, aligned: bool, halves: bool
) -> Iterator[GroupConfig]:
    tiles = FORWARD_TILES if config is GroupNormFwd else BACKWARD_TILES
    layout, vector = "first", vector_width(kind[0])
    if halves:
        layout, tiles = "halves", tiles[:HALVES_TILES]
    elif not aligned:
        tiles, vector = ELEMENT_TILES, 1
    for threads, loads, blocks in tiles:
        yield config(*kind, layout, threads, loads, vector, blocks)


def _clusters(direction: str, kind: Kind) -> Iterator[ClusterConfig]:
    forward = direction == "forward"
    config = GroupNormFwdCluster if forward else GroupNormBwdCluster
    for threads, loads, blocks in CLUSTER_FORWARD if forward else CLUSTER_BACKWARD:
        yield config(*kind, threads, loads, vector_width(kind[0]), blocks)


def _three_step(tile: tuple[int, int], dtype: str, aligned: bool) -> tuple[int, int, int]:
    """(loads, vector, blocks)."""
    return tile[0], vector_width(dtype) if aligned else 1, tile[1]
