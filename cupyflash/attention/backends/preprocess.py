"""The first kernels of every backward pass, the same for all backends."""

import dataclasses
from typing import ClassVar

from ...runtime.config import KernelConfig
from ...runtime.structs import header

structs = header("attention/params.cuh")

THREADS = 128
ROWS_PER_BLOCK = header("attention/flash_bwd_preprocess.cu").ROWS_PER_BLOCK


@dataclasses.dataclass(frozen=True)
class FlashBwdPreprocess(KernelConfig):
    """delta and lse_log2 of every query row; zeroes the accumulators.

    Attributes:
        dtype: of dout and out.
        accum_dim: columns of ``dq_accum``; 0 if the backend has none.
    """

    source: ClassVar[str] = "attention/flash_bwd_preprocess.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams
    threads: ClassVar[int] = THREADS

    dtype: str
    accum_dim: int

    def grid(self, shape: structs.AttentionShape) -> int:
        """Number of blocks; they also cover the padding rows of each sequence."""
        rows = -(-shape.seqlen_q // structs.ACCUM_ROW_ALIGN) * structs.ACCUM_ROW_ALIGN
        return rows // ROWS_PER_BLOCK * shape.heads_q * shape.batch


@dataclasses.dataclass(frozen=True)
class FlashBwdSinks(KernelConfig):
    """The gradient of the sinks, where there are any: a block sums over the rows of one head."""

    source: ClassVar[str] = "attention/flash_bwd_sinks.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams

    num_warps: int = 8

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_warps * 32

    def grid(self, shape: structs.AttentionShape) -> int:
        """Number of blocks."""
        return shape.heads_q
