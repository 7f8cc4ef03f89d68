"""GroupNorm of what the registers of a block or a cluster hold, channels first, in one launch."""

import dataclasses
from typing import ClassVar

from ..runtime.config import KernelConfig
from ..runtime.structs import header
from .kernels import block_threads

structs = header("norm/params.cuh")


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

    @property
    def threads(self) -> int:
        """Threads of a block: one group, or several that each have a warp or less."""
        return block_threads(self.row_threads)


class GroupNormFwd(GroupConfig):
    """Forward."""

    source: ClassVar[str] = "norm/group_norm_fwd.cu"
    params: ClassVar[type[structs.GroupNormFwdParams]] = structs.GroupNormFwdParams


class GroupNormBwd(GroupConfig):
    """Backward."""

    takes_turns: ClassVar[bool] = True
    source: ClassVar[str] = "norm/group_norm_bwd.cu"
    params: ClassVar[type[structs.GroupNormBwdParams]] = structs.GroupNormBwdParams


@dataclasses.dataclass(frozen=True)
class GroupNormFwdPipelined(OneStepConfig):
    """Forward: a warp has a group, or several, of one sample after the other.

    Attributes:
        layout: as in `GroupConfig`.
        places: samples that a warp has in shared memory.
    """

    cluster: ClassVar[int] = 1
    takes_turns: ClassVar[bool] = True
    source: ClassVar[str] = "norm/group_norm_fwd_pipelined.cu"
    params: ClassVar[type[structs.GroupNormFwdParams]] = structs.GroupNormFwdParams

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
    def shared_memory(self) -> int:
        """Of the samples."""
        return 16 * self.places * self.loads * self.num_threads


@dataclasses.dataclass(frozen=True)
class GroupNormFwdCluster(OneStepConfig):
    """Forward: the blocks of a cluster share a group, one after the other."""

    source: ClassVar[str] = "norm/group_norm_fwd_cluster.cu"
    params: ClassVar[type[structs.GroupNormFwdParams]] = structs.GroupNormFwdParams

    dtype: str
    weight: str
    activation: str
    cluster: int
    row_threads: int
    loads: int
    vector: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.row_threads

    @property
    def shared_memory(self) -> int:
        """Of the next group."""
        return 16 * self.loads * self.row_threads


@dataclasses.dataclass(frozen=True)
class GroupNormBwdCluster(GroupNormFwdCluster):
    """Backward: the same, a group of one sample after the other."""

    source: ClassVar[str] = "norm/group_norm_bwd_cluster.cu"
    params: ClassVar[type[structs.GroupNormBwdParams]] = structs.GroupNormBwdParams

    @property
    def shared_memory(self) -> int:
        """Of x and dout, and of each pack two sums."""
        return (2 * 16 + 8) * self.loads * self.row_threads


@dataclasses.dataclass(frozen=True)
class GroupNormBwdPipelined(OneStepConfig):
    """Backward: a block has a group, or several, of one sample after the other.

    Attributes:
        layout: as in `GroupConfig`.
    """

    cluster: ClassVar[int] = 1
    takes_turns: ClassVar[bool] = True
    source: ClassVar[str] = "norm/group_norm_bwd_pipelined.cu"
    params: ClassVar[type[structs.GroupNormBwdParams]] = structs.GroupNormBwdParams

    dtype: str
    weight: str
    activation: str
    layout: str
    row_threads: int
    loads: int
    vector: int
    num_threads: int
    blocks: int

    @property
    def shared_memory(self) -> int:
        """Of x and dout, and of each pack two sums and the bias if registers are short."""
        sums = 12 * (2 if self.layout == "halves" else 1) * (self.loads * self.vector > 16)
        return (2 * 16 + sums) * self.num_threads * self.loads
