"""The backward kernel of the backend ``sm80`` for sequences of at most 64 queries and 64 keys."""

import dataclasses
from typing import ClassVar

from ....runtime.gpu import architecture
from ....runtime.structs import header
from ..kernels import AttentionKernel
from ..kind import KEY_MASK, ONE_TILE, Kind

structs = header("attention/params.cuh")

HEAD_DIMS = (32, 64, 96, 128)  # of the tiles; others are rounded up
MAX_HEAD_DIM_BIAS = 32  # the sum of a bias gradient takes registers
# A block of the backward kernel takes several sequences only if MANY_BLOCKS blocks are left, and at
# most MAX_SEQUENCES.
MAX_SEQUENCES, MANY_BLOCKS = 16, 1024


@dataclasses.dataclass(frozen=True)
class FlashBwdShortSm80(AttentionKernel):
    """The whole backward pass: a block belongs to a head and takes several sequences."""

    source: ClassVar[str] = "attention/sm80/flash_bwd_short_sm80.cu"

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


def supports(kind: Kind) -> bool:
    """Whether `kernel` takes such a problem."""
    features = kind.features
    plain = not features.changes_scores
    fits = kind.head_dim <= (MAX_HEAD_DIM_BIAS if features.bias else max(HEAD_DIMS))
    fits = fits and features.bias < KEY_MASK and plain and features.one_pass
    card = architecture(kind.capability)
    return fits and card.copies >= 80 and kernel(kind).smem_bytes < card.shared_memory * 1024


def kernel(kind: Kind) -> FlashBwdShortSm80:
    """The one kernel of the backward pass."""
    bias, padded = kind.features.bias, next(x for x in HEAD_DIMS if x >= kind.head_dim)
    num_warps = 4 if padded == 32 and not bias else 8
    tile_bytes, pool_bytes = 2 * ONE_TILE * padded, 4 * ONE_TILE * ONE_TILE
    bias_bytes = 4 * ONE_TILE * ONE_TILE if bias else 0
    smem_bytes = 4 * tile_bytes + max(3 * tile_bytes, pool_bytes) + bias_bytes
    arch = architecture(kind.capability).mma
    return FlashBwdShortSm80(kind.dtype, padded, ONE_TILE, num_warps, arch, bias, smem_bytes)
