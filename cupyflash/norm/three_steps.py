"""GroupNorm of what no block can hold, in three launches that read twice; `three_steps.cuh`."""

import dataclasses
import math
from typing import ClassVar

from ..runtime.config import KernelConfig, vector_width
from ..runtime.structs import header

structs = header("norm/params.cuh")

Kind = tuple[str, str, str]  # dtypes of x and of weight, activation
# (loads, blocks of a multiprocessor).
SPLIT_FORWARD, SPLIT_BACKWARD = (4, 4), (4, 2)
LAST_FORWARD, LAST_BACKWARD = (6, 3), (4, 2)
THREADS = 256
STEPS = header("norm/three_steps.cuh").Step


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
        return THREADS


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

    def pieces(self, tiling: structs.ChannelTiling, positions: int, most: int) -> int:
        """Blocks that share a sample, ``most`` if the sample is large enough."""
        rows = self.threads // -(-tiling.channels // self.vector)
        turns = -(-positions // (rows * self.loads))
        of_share = -(-turns // max(1, min(turns, most // tiling.tiles)))
        return tiling.tiles * -(-turns // of_share)


class GroupNormFwdSplit(SplitConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd_split.cu"
    params: ClassVar[type[structs.GroupNormFwdParams]] = structs.GroupNormFwdParams


class GroupNormBwdSplit(SplitConfig):
    """Backward."""

    source: ClassVar[str] = "norm/group_norm_bwd_split.cu"
    params: ClassVar[type[structs.GroupNormBwdParams]] = structs.GroupNormBwdParams


class GroupNormFwdLast(LastConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd_last.cu"
    params: ClassVar[type[structs.GroupNormFwdParams]] = structs.GroupNormFwdParams


class GroupNormBwdLast(LastConfig):
    """Backward."""

    source: ClassVar[str] = "norm/group_norm_bwd_last.cu"
    params: ClassVar[type[structs.GroupNormBwdParams]] = structs.GroupNormBwdParams


def forward_split(kind: Kind, aligned: bool) -> GroupNormFwdSplit:
    """The kernel for channels first."""
    return GroupNormFwdSplit(*kind, *_tile(SPLIT_FORWARD, kind[0], aligned))


def backward_split(kind: Kind, aligned: bool) -> GroupNormBwdSplit:
    """The kernel for channels first."""
    return GroupNormBwdSplit(*kind, *_tile(SPLIT_BACKWARD, kind[0], aligned))


def forward_last(kind: Kind, aligned: bool) -> GroupNormFwdLast:
    """The kernel for channels last."""
    return GroupNormFwdLast(*kind, *_tile(LAST_FORWARD, kind[0], aligned))


def backward_last(kind: Kind, aligned: bool) -> GroupNormBwdLast:
    """The kernel for channels last."""
    return GroupNormBwdLast(*kind, *_tile(LAST_BACKWARD, kind[0], aligned))


def channel_tiling(num_groups: int, channels: int, vector: int) -> structs.ChannelTiling | None:
    """Which channels a block has of ``num_groups`` groups; None if packs would cross tiles."""
    most = THREADS * vector
    step = vector // math.gcd(channels, vector)  # groups that end where a pack ends
    groups = min(num_groups, most // (channels * step) * step)
    if groups:
        return structs.ChannelTiling(-(-num_groups // groups), groups, 1, groups * channels)
    if step > 1:
        return None
    width = -(-channels // -(-channels // most))
    width += -width % vector
    parts = -(-channels // width)
    return structs.ChannelTiling(num_groups * parts, 1, parts, width)


def _tile(tile: tuple[int, int], dtype: str, aligned: bool) -> tuple[int, int, int]:
    """(loads, vector, blocks)."""
    return tile[0], vector_width(dtype) if aligned else 1, tile[1]
