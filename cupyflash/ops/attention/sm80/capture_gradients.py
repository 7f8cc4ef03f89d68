"""The gradients of the captures of a text on tensor cores."""

import dataclasses
from typing import ClassVar

from ....runtime.gpu import HALF, architecture
from ..capture_gradients import CaptureGradients, CapturesKernel
from ..kind import Access, Kind
from ..passes import Wanted
from ..problem import Problem
from ..simt import kernels as simt
from .forward import padded_head_dim

# block_m, block_n, num_warps: the first one whose operands fit the shared memory.
TILES = ((64, 64, 4), (32, 64, 4), (32, 32, 4))
CONSTANTS = 3 * 1024  # bytes of shared memory


@dataclasses.dataclass(frozen=True)
class FlashBwdCapturesSm80(CapturesKernel):
    """Backward: the gradients of captures; a block owns ``block_n`` keys of a key head."""

    source: ClassVar[str] = "attention/sm80/flash_bwd_captures_sm80.cu"

    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    arch: int
    bias: int
    dropout: bool
    smem_bytes: int


def kernel(kind: Kind) -> FlashBwdCapturesSm80 | None:
    """The kernel for a problem whose captures learn; None where there is none."""
    dtype, head_dim, features, capability = kind
    arch = architecture(capability)
    if dtype not in HALF or dtype not in arch.mma_dtypes:
        return None
    padded = padded_head_dim(head_dim)
    bias = features.bias
    for block_m, block_n, num_warps in TILES:
        smem_bytes = 4 * (block_m + block_n) * padded
        if smem_bytes <= arch.shared_memory * 1024 - CONSTANTS:
            options = (arch.mma, bias, features.dropout, smem_bytes)
            tile = (block_m, block_n, num_warps)
            return FlashBwdCapturesSm80(dtype, padded, *tile, *options, text=features.text)
    return None


def plan(problem: Problem, kind: Kind, wanted: Wanted) -> CaptureGradients | None:
    """The gradients of the captures of a problem; None if none learns.

    The kernel for CUDA cores takes what this one does not.
    """
    if not problem.learned:
        return None
    config = kernel(kind) if problem.access >= Access.VECTOR else None
    return CaptureGradients(config or simt.captures_kernel(kind), problem, wanted)
