"""Kernels of the backend ``sm80`` for sequences that fit one tile of 64 queries and 64 keys."""

import dataclasses
from typing import ClassVar

from ...runtime.gpu import Capability, architecture
from ...runtime.structs import header
from ..problem import KEY_MASK, ONE_TILE, Features
from .config import AttentionKernel

structs = header("attention/params.cuh")

MAX_HEAD_DIM, MAX_HEAD_DIM_BIAS = 64, 32  # the sum of a bias gradient takes registers
# Sequences that a block of the backward kernel takes at most, and the blocks that there are before
# any takes two.
MAX_SEQUENCES, MANY_BLOCKS = 16, 1024


@dataclasses.dataclass(frozen=True)
class FlashBwdShortSm80(AttentionKernel):
    """The whole backward pass: a block belongs to a head and takes several sequences."""

    source: ClassVar[str] = "attention/flash_bwd_short_sm80.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams
    accum_dim: ClassVar[int] = 0

    dtype: str
    head_dim: int
    block: int
    num_warps: int
    arch: int
    bias: int
    smem_bytes: int

    def grid(self, shape: structs.AttentionShape) -> int:
        """Number of blocks, the same for every head."""
        sequences = max(1, min(MAX_SEQUENCES, shape.batch * shape.heads_q // MANY_BLOCKS))
        return -(-shape.batch // sequences) * shape.heads_q


def supports_backward(head_dim: int, features: Features, capability: Capability) -> bool:
    """Whether `backward` takes such a problem."""
    plain = not (features.softcap or features.alibi or features.dropout)
    fits = head_dim <= (MAX_HEAD_DIM_BIAS if features.bias else MAX_HEAD_DIM)
    fits &= features.bias < KEY_MASK
    return fits and plain and features.one_pass and architecture(capability).copies >= 80


def backward(
    dtype: str, head_dim: int, features: Features, capability: Capability
) -> tuple[FlashBwdShortSm80]:
    """The one kernel of the backward pass."""
    padded = 32 if head_dim <= 32 else 64
    num_warps = 4 if padded == 32 and not features.bias else 8
    tile_bytes, pool_bytes = 2 * ONE_TILE * padded, 4 * ONE_TILE * ONE_TILE
    bias_bytes = 4 * ONE_TILE * ONE_TILE if features.bias else 0
    smem_bytes = 4 * tile_bytes + max(3 * tile_bytes, pool_bytes) + bias_bytes
    arch = architecture(capability).mma
    return (FlashBwdShortSm80(dtype, padded, ONE_TILE, num_warps, arch, features.bias, smem_bytes),)
