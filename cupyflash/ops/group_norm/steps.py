"""GroupNorm in three launches, which read twice: for groups of any size, and NHWC."""

import dataclasses
import math
from typing import ClassVar

from ...runtime.config import KernelConfig, vector_width
from ...runtime.structs import header

structs, _steps = header("group_norm/params.cuh"), header("group_norm/position_tiles.cuh")

Kind = tuple[str, str, str]  # dtypes of x and of weight, activation

# (loads, blocks of a multiprocessor) of the three steps, in NCHW and in NHWC.
FORWARD_STEPS, BACKWARD_STEPS = ((4, 4), (6, 3)), ((4, 2), (4, 2))


@dataclasses.dataclass(frozen=True)
class StepConfig(KernelConfig):
    """A kernel that reads twice, in three launches, one for each of its steps."""

    threads: ClassVar[int] = _steps.THREADS

    dtype: str
    weight: str
    activation: str
    nhwc: bool
    loads: int
    vector: int
    blocks: int
    step: str = _steps.Step[0]

    def steps(self) -> list["StepConfig"]:
        """The three kernels."""
        return [dataclasses.replace(self, step=step) for step in _steps.Step]

    @property
    def records(self) -> int:
        """Partial sums of a channel that a block writes at most: one for each warp in NCHW."""
        return 1 if self.nhwc else self.threads // 32

    def gather_blocks(self, groups: int) -> int:
        """Blocks of the second step: in NCHW one for each group, in NHWC a warp."""
        return -(-groups // (self.threads // 32)) if self.nhwc else groups

    def tiling(
        self, num_groups: int, channels: int, positions: int, most: int
    ) -> structs.StepTiling | None:
        """The way in which blocks share a unit: a group in NCHW, a sample in NHWC.

        Args:
            num_groups: of a sample.
            channels: of a group.
            positions: of a sample.
            most: blocks that should share a sample in NHWC, if it is large enough.

        Returns:
            None in NHWC where packs would cross tiles of channels.
        """
        if not self.nhwc:
            segments = channels * -(-positions // (32 * self.loads * self.vector))
            return structs.StepTiling(blocks=-(-segments // (self.threads // 32)))
        tiling = _channel_tiling(num_groups, channels, self.vector)
        if tiling:
            rows = self.threads // -(-tiling.channels // self.vector)
            turns = -(-positions // (rows * self.loads))
            of_share = -(-turns // max(1, min(turns, most // tiling.tiles)))
            tiling.blocks = tiling.tiles * -(-turns // of_share)
        return tiling


class GroupNormFwdSteps(StepConfig):
    """Forward."""

    source: ClassVar[str] = "group_norm/group_norm_fwd_steps.cu"


class GroupNormBwdSteps(StepConfig):
    """Backward."""

    source: ClassVar[str] = "group_norm/group_norm_bwd_steps.cu"


def three_steps(backward: bool, kind: Kind, aligned: bool, nhwc: bool) -> StepConfig:
    """The kernel for groups of any size, and for NHWC."""
    config, tiles = (
        (GroupNormBwdSteps, BACKWARD_STEPS) if backward else (GroupNormFwdSteps, FORWARD_STEPS)
    )
    loads, blocks = tiles[nhwc]
    return config(*kind, nhwc, loads, vector_width(kind[0]) if aligned else 1, blocks)


def _channel_tiling(num_groups: int, channels: int, vector: int) -> structs.StepTiling | None:
    """The channels of a block of ``num_groups`` groups; None if packs would cross tiles."""
    most = _steps.THREADS * vector
    step = vector // math.gcd(channels, vector)  # groups that end where a pack ends
    groups = min(num_groups, most // (channels * step) * step)
    if groups:
        return structs.StepTiling(0, -(-num_groups // groups), groups, 1, groups * channels)
    if step > 1:
        return None
    width = -(-channels // -(-channels // most))
    width += -width % vector
    parts = -(-channels // width)
    return structs.StepTiling(0, num_groups * parts, 1, parts, width)
