"""LayerNorm and RMSNorm: the configurations of the kernels."""

import dataclasses
import math
from typing import ClassVar

from ...runtime.config import KernelConfig
from ...runtime.structs import header

dropout_structs = header("norm/dropout_add.cu")

MIN_BLOCK_THREADS = header("norm/row_tile.cuh").MIN_BLOCK_THREADS


def block_threads(row_threads: int) -> int:
    """Threads of a block: one row, or several that each have a warp or less."""
    return row_threads if row_threads > 32 else MIN_BLOCK_THREADS


def stage_bytes(threads: int, loads: int, vector: int) -> int:
    """Bytes of the parts of x, dout and dresidual that this many threads have of their rows."""
    return 3 * threads * loads * (16 if vector > 1 else 4)


@dataclasses.dataclass(frozen=True)
class RowConfig(KernelConfig):
    """A kernel in which ``row_threads`` threads of one or several blocks have a row.

    Subclasses have besides: ``cluster``, blocks that share a row; ``num_threads`` of a block;
    ``loads`` of a thread, ``vector`` elements each; ``blocks`` of a multiprocessor at a time;
    ``stages`` of the ring in shared memory, one row each.

    Attributes:
        weight: dtype of weight and bias.
        rms: RMSNorm, not LayerNorm.
    """

    dtype: str
    weight: str
    rms: bool

    @property
    def columns(self) -> int:
        """The longest row, which is in registers as a whole."""
        return self.row_threads * self.loads * self.vector

    @property
    def shared_memory(self) -> int:
        """Bytes of the ring."""
        return getattr(self, "stages", 0) * stage_bytes(self.threads, self.loads, self.vector)

    def grid(self, rows: int) -> int:
        """Number of blocks of which each has its rows once."""
        return -(-rows * self.row_threads // self.threads)


@dataclasses.dataclass(frozen=True)
class NormFwd(RowConfig):
    """Forward of rows that fit into the registers of a block."""

    source: ClassVar[str] = "norm/norm_fwd.cu"
    dependent: ClassVar[bool] = True

    row_threads: int
    loads: int
    vector: int
    blocks: int

    @property
    def threads(self) -> int:
        return block_threads(self.row_threads)


@dataclasses.dataclass(frozen=True)
class NormBwd(RowConfig):
    """Backward of rows that fit into the registers of a block."""

    source: ClassVar[str] = "norm/norm_bwd.cu"
    cooperative: ClassVar[bool] = True

    row_threads: int
    loads: int
    vector: int
    num_threads: int
    stages: int


@dataclasses.dataclass(frozen=True)
class RowClusterConfig(RowConfig):
    """A kernel in which the blocks of a cluster share a longer row."""

    cluster: int
    num_threads: int
    loads: int
    vector: int

    @property
    def row_threads(self) -> int:
        """Threads of a row."""
        return self.cluster * self.num_threads


@dataclasses.dataclass(frozen=True)
class NormFwdCluster(RowClusterConfig):
    """Forward of longer rows."""

    source: ClassVar[str] = "norm/norm_fwd_cluster.cu"
    dependent: ClassVar[bool] = True

    blocks: int


@dataclasses.dataclass(frozen=True)
class NormBwdCluster(RowClusterConfig):
    """Backward of longer rows."""

    source: ClassVar[str] = "norm/norm_bwd_cluster.cu"

    stages: int


@dataclasses.dataclass(frozen=True)
class LongConfig(RowConfig):
    """A kernel whose block has a row of any length, of which it reads ``loads`` at a time."""

    columns: ClassVar[float] = math.inf

    num_threads: int
    loads: int
    vector: int

    @property
    def row_threads(self) -> int:
        """Threads of a row."""
        return self.num_threads


class NormFwdLong(LongConfig):
    """Forward of rows of any length."""

    source: ClassVar[str] = "norm/norm_fwd_long.cu"


class NormBwdLong(LongConfig):
    """Gradient of the input, of rows of any length."""

    source: ClassVar[str] = "norm/norm_bwd_long.cu"


@dataclasses.dataclass(frozen=True)
class NormBwdWeight(KernelConfig):
    """Partial sums of the gradients of weight and bias, beside `NormBwdLong`."""

    source: ClassVar[str] = "norm/norm_bwd_weight.cu"
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
    """Adds up partial sums of the gradients of weight and bias, 32 columns a block."""

    source: ClassVar[str] = "norm/sum_partials.cu"

    weight: str
    warps: int = 32

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclasses.dataclass(frozen=True)
class DropoutAdd(KernelConfig):
    """Dropout and residual before a norm, elementwise; a thread has ``vector`` columns of a row.

    Attributes:
        out: dtype of the result and of the residual.
    """

    source: ClassVar[str] = "norm/dropout_add.cu"
    threads: ClassVar[int] = dropout_structs.THREADS

    dtype: str
    out: str
    vector: int

    def grid(self, rows: int, columns: int) -> int:
        return -(-rows * -(-columns // self.vector) // self.threads)
