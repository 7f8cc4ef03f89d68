"""GroupNorm with an activation: in one step where a group fits into registers, else in three."""

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
LAST_FORWARD, LAST_BACKWARD = (8, 2), (3, 2)
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

    def pieces(self, tiling: ChannelTiling, positions: int) -> int:
        """Blocks that share a sample."""
        rows = self.threads // -(-tiling.channels // self.vector)
        return tiling.tiles * -(-positions // (rows * self.loads))


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
    """Everything that the four above can return."""
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


def _three_step(tile: tuple[int, int], dtype: str, aligned: bool) -> tuple[int, int, int]:
    """(loads, vector, blocks)."""
    return tile[0], vector_width(dtype) if aligned else 1, tile[1]
