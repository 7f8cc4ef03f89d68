"""The baselines: what a kernel looks like before it is made fast."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from ..runtime.config import ITEM_SIZE, KernelConfig
from ..runtime.structs import header

structs = header("baselines/params.cuh")

THREADS = 256
STEPS = header("baselines/naive_attention.cu").Step
LANE_COLUMNS = (1, 2, 4, 8)
MAX_HEAD_DIM = 32 * LANE_COLUMNS[-1]  # of fused_attention


@dataclasses.dataclass(frozen=True)
class Baseline(KernelConfig):
    """A kernel of one dtype."""

    dtype: str

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS


class VectorAdd(Baseline):
    """out = a + b."""

    source: ClassVar[str] = "baselines/vector_add.cu"
    params: ClassVar[type[structs.VectorAddParams]] = structs.VectorAddParams


@dataclasses.dataclass(frozen=True)
class NaiveAttention(Baseline):
    """One of the `STEPS`."""

    source: ClassVar[str] = "baselines/naive_attention.cu"
    params: ClassVar[type[structs.BaselineAttentionParams]] = structs.BaselineAttentionParams

    step: str


@dataclasses.dataclass(frozen=True)
class FusedAttention(Baseline):
    """One pass; a lane of a warp has ``lane_columns`` of a row."""

    source: ClassVar[str] = "baselines/fused_attention.cu"
    params: ClassVar[type[structs.BaselineAttentionParams]] = structs.BaselineAttentionParams

    lane_columns: int


def fused_attention(dtype: str, head_dim: int) -> FusedAttention:
    """The kernel for a head dim of at most `MAX_HEAD_DIM`."""
    return FusedAttention(dtype, next(n for n in LANE_COLUMNS if head_dim <= 32 * n))


def configurations(capability: tuple[int, int]) -> Iterator[Baseline]:
    """All of them."""
    for dtype in ITEM_SIZE:
        yield VectorAdd(dtype)
        yield from (NaiveAttention(dtype, step) for step in STEPS)
        yield from (FusedAttention(dtype, columns) for columns in LANE_COLUMNS)
