"""GroupNorm with an activation: in one pass where a group fits into registers, else in two."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ..kernel_config import ITEM_SIZE, KernelConfig
from ..norm_params import GroupNormBwdParams, GroupNormFwdParams
from .norm import vector_width, weight_dtypes

ACTIVATIONS = ("none", "silu", "mish", "gelu", "gelu_tanh")  # as in activation.cuh
# (threads of a block, loads of a thread), the smallest groups first.
FORWARD_TILES = ((128, 1), (256, 2), (512, 4), (1024, 6))
BACKWARD_TILES = ((128, 1), (256, 2), (512, 4))
SPLIT_THREADS = 256  # of the kernels that share a group between blocks
STATS_LOADS = 4


@dataclasses.dataclass(frozen=True)
class GroupConfig(KernelConfig):
    """A kernel whose block has a group.

    Attributes:
        weight: dtype of weight and bias.
        loads: of a thread, ``vector`` elements each.
    """

    dtype: str
    weight: str
    activation: str
    channels_last: bool
    num_threads: int
    loads: int
    vector: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_threads

    @property
    def size(self) -> int:
        """Elements of the largest group."""
        return self.threads * self.loads * self.vector


class GroupNormFwd(GroupConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd.cu"
    params: ClassVar[type[GroupNormFwdParams]] = GroupNormFwdParams


class GroupNormBwd(GroupConfig):
    """Backward."""

    source: ClassVar[str] = "norm/group_norm_bwd.cu"
    params: ClassVar[type[GroupNormBwdParams]] = GroupNormBwdParams


@dataclasses.dataclass(frozen=True)
class SplitConfig(KernelConfig):
    """A kernel in which several blocks share a group."""

    dtype: str
    weight: str
    activation: str
    channels_last: bool
    vector: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return SPLIT_THREADS


@dataclasses.dataclass(frozen=True)
class GroupNormStats(KernelConfig):
    """First pass of the forward."""

    source: ClassVar[str] = "norm/group_norm_stats.cu"
    params: ClassVar[type[GroupNormFwdParams]] = GroupNormFwdParams

    dtype: str
    vector: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return SPLIT_THREADS

    @property
    def piece(self) -> int:
        """Elements that a block has in registers at a time."""
        return SPLIT_THREADS * STATS_LOADS * self.vector


class GroupNormApply(SplitConfig):
    """Second pass of the forward."""

    source: ClassVar[str] = "norm/group_norm_apply.cu"
    params: ClassVar[type[GroupNormFwdParams]] = GroupNormFwdParams


class GroupNormBwdSums(SplitConfig):
    """First pass of the backward."""

    source: ClassVar[str] = "norm/group_norm_bwd_sums.cu"
    params: ClassVar[type[GroupNormBwdParams]] = GroupNormBwdParams

    @property
    def channels(self) -> int:
        """Channels of a block."""
        return 32 * self.vector if self.channels_last else 1


class GroupNormBwdApply(SplitConfig):
    """Second pass of the backward."""

    source: ClassVar[str] = "norm/group_norm_bwd_apply.cu"
    params: ClassVar[type[GroupNormBwdParams]] = GroupNormBwdParams


def forward(
    dtype: str, weight: str, activation: str, channels_last: bool, size: int, aligned: bool
) -> GroupNormFwd | tuple[GroupNormStats, GroupNormApply]:
    """The kernel for groups of ``size`` elements, or the two where they are too large for it."""
    kind, vector = (dtype, weight, activation, channels_last), _vector(dtype, aligned)
    for tile in FORWARD_TILES:
        config = GroupNormFwd(*kind, *tile, vector)
        if size <= config.size:
            return config
    return GroupNormStats(dtype, vector), GroupNormApply(*kind, vector)


def backward(
    dtype: str,
    weight: str,
    activation: str,
    channels_last: bool,
    rows: int,
    columns: int,
    aligned: bool,
) -> GroupNormBwd | tuple[GroupNormBwdSums, GroupNormBwdApply]:
    """The kernel for groups of rows x columns, or the two where they are too large for it."""
    kind, vector = (dtype, weight, activation, channels_last), _vector(dtype, aligned)
    for tile in BACKWARD_TILES:
        config = GroupNormBwd(*kind, *tile, vector)
        row_packs = columns // vector
        active = config.threads  # which of them have packs, see group_norm_bwd.cu
        if channels_last:
            active -= active % row_packs if row_packs <= active else active
        if rows * columns <= active * config.loads * vector:
            return config
    return GroupNormBwdSums(*kind, vector), GroupNormBwdApply(*kind, vector)


def configurations(capability: tuple[int, int]) -> Iterator[KernelConfig]:
    """Everything that the two above can return."""
    switches = (False, True)
    for dtype, aligned in itertools.product(ITEM_SIZE, switches):
        vector = _vector(dtype, aligned)
        yield GroupNormStats(dtype, vector)
        kinds = itertools.product((dtype,), weight_dtypes(dtype), ACTIVATIONS, switches)
        for kind in kinds:
            yield from (GroupNormFwd(*kind, *tile, vector) for tile in FORWARD_TILES)
            yield from (GroupNormBwd(*kind, *tile, vector) for tile in BACKWARD_TILES)
            for split in (GroupNormApply, GroupNormBwdSums, GroupNormBwdApply):
                yield split(*kind, vector)


def _vector(dtype: str, aligned: bool) -> int:
    return vector_width(dtype) if aligned else 1
