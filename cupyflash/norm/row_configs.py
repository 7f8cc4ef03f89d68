"""The kernels of LayerNorm and RMSNorm, and what bounds their tiles."""

import dataclasses
from typing import ClassVar

from ..runtime.config import KernelConfig
from ..runtime.gpu import Capability
from ..runtime.structs import header

structs = header("norm/params.cuh")

MIN_BLOCK_THREADS = header("norm/row_tile.cuh").MIN_BLOCK_THREADS
# Threads of a multiprocessor that registers are bounded for; 1024 where nothing is said: sm_75 has
# no more of them, sm_86 and sm_89 1536, and sm_100 and sm_120 would spill.
RESIDENT_THREADS = {(8, 0): 2048, (9, 0): 2048}


def resident_blocks(blocks: int, threads: int, capability: Capability) -> int:
    """How many of ``blocks`` blocks of a multiprocessor its registers are bounded for."""
    return min(blocks, RESIDENT_THREADS.get(capability, 1024) // threads)


def block_threads(row_threads: int) -> int:
    """Threads of a block: one row, or several that each have a warp or less."""
    return row_threads if row_threads > 32 else MIN_BLOCK_THREADS


def stage_bytes(threads: int, loads: int, vector: int) -> int:
    """Of what this many threads have of their rows of x, dout and dresidual."""
    return 3 * threads * loads * (16 if vector > 1 else 4)


@dataclasses.dataclass(frozen=True)
class RowConfig(KernelConfig):
    """A kernel in which ``row_threads`` threads have a row.

    Attributes:
        weight: dtype of weight and bias.
        rms: RMSNorm, not LayerNorm.
        loads: of a thread, ``vector`` elements each.
        blocks: of a multiprocessor at a time.
    """

    dtype: str
    weight: str
    rms: bool
    row_threads: int
    loads: int
    vector: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return block_threads(self.row_threads)

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.threads // self.row_threads

    @property
    def columns(self) -> int:
        """The longest row that is in registers as a whole."""
        return self.row_threads * self.loads * self.vector


class NormFwd(RowConfig):
    """Forward."""

    source: ClassVar[str] = "norm/norm_fwd.cu"
    params: ClassVar[type[structs.NormFwdParams]] = structs.NormFwdParams

    def grid(self, rows: int) -> int:
        """Number of blocks."""
        return -(-rows // self.rows)


@dataclasses.dataclass(frozen=True)
class RowClusterConfig(KernelConfig):
    """A kernel in which ``cluster`` blocks share a longer row."""

    dtype: str
    weight: str
    rms: bool
    cluster: int
    num_threads: int
    loads: int
    vector: int

    @property
    def columns(self) -> int:
        """The longest row."""
        return self.cluster * self.num_threads * self.loads * self.vector


@dataclasses.dataclass(frozen=True)
class NormFwdCluster(RowClusterConfig):
    """Forward.

    Attributes:
        blocks: of a multiprocessor at a time.
    """

    source: ClassVar[str] = "norm/norm_fwd_cluster.cu"
    params: ClassVar[type[structs.NormFwdParams]] = structs.NormFwdParams

    blocks: int

    def grid(self, rows: int) -> int:
        """Number of blocks."""
        return rows * self.cluster


@dataclasses.dataclass(frozen=True)
class NormBwd(KernelConfig):
    """Backward of rows that fit into the registers of a block.

    Attributes:
        stages: of the ring in shared memory, one row each.
    """

    source: ClassVar[str] = "norm/norm_bwd.cu"
    params: ClassVar[type[structs.NormBwdParams]] = structs.NormBwdParams
    cooperative: ClassVar[bool] = True

    dtype: str
    weight: str
    rms: bool
    row_threads: int
    loads: int
    vector: int
    num_threads: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows of a block at a time."""
        return self.num_threads // self.row_threads

    @property
    def columns(self) -> int:
        """The longest row."""
        return self.row_threads * self.loads * self.vector

    @property
    def shared_memory(self) -> int:
        """Of the ring: x, dout and dresidual."""
        return self.stages * stage_bytes(self.num_threads, self.loads, self.vector)


@dataclasses.dataclass(frozen=True)
class NormBwdCluster(RowClusterConfig):
    """Backward.

    Attributes:
        stages: as in `NormBwd`.
    """

    source: ClassVar[str] = "norm/norm_bwd_cluster.cu"
    params: ClassVar[type[structs.NormBwdParams]] = structs.NormBwdParams

    stages: int

    @property
    def shared_memory(self) -> int:
        """Of the ring: x, dout and dresidual."""
        return self.stages * stage_bytes(self.num_threads, self.loads, self.vector)


@dataclasses.dataclass(frozen=True)
class LongConfig(KernelConfig):
    """A kernel whose block has a row of any length, of which it reads ``loads`` at a time."""

    dtype: str
    weight: str
    rms: bool
    num_threads: int
    loads: int
    vector: int


class NormFwdLong(LongConfig):
    """Forward of longer rows."""

    source: ClassVar[str] = "norm/norm_fwd_long.cu"
    params: ClassVar[type[structs.NormFwdParams]] = structs.NormFwdParams

    def grid(self, rows: int) -> int:
        """Number of blocks."""
        return rows


class NormBwdLong(LongConfig):
    """Gradient of the input for longer rows."""

    source: ClassVar[str] = "norm/norm_bwd_long.cu"
    params: ClassVar[type[structs.NormBwdParams]] = structs.NormBwdParams


@dataclasses.dataclass(frozen=True)
class NormBwdWeight(KernelConfig):
    """Shares of the gradient of weight and bias for longer rows."""

    source: ClassVar[str] = "norm/norm_bwd_weight.cu"
    params: ClassVar[type[structs.NormBwdParams]] = structs.NormBwdParams
    threads: ClassVar[int] = MIN_BLOCK_THREADS

    dtype: str
    rms: bool
    vector: int

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.threads * self.vector


@dataclasses.dataclass(frozen=True)
class SumPartials(KernelConfig):
    """Adds shares of the gradient of weight and bias up: ``warps`` to a block of 32 columns."""

    source: ClassVar[str] = "norm/sum_partials.cu"
    params: ClassVar[type[structs.SumPartialsParams]] = structs.SumPartialsParams

    weight: str
    warps: int = 32

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps
