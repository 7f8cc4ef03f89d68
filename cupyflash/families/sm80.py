"""Family ``sm80``: mma.sync tensor cores, float16 and bfloat16 (Turing: float16 only).

Tiles are chosen by head dim and by what the GPU has: shared memory (A100, H100 and B200 have twice
that of consumer cards) and, on Turing, no asynchronous copies. They were measured on an H200 for
head dims 64 and 128 (bench/NOTES.md); the others are the largest that compile without spills.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ..kernel_config import Access, Features, KernelConfig
from ..params import AttentionShape, FlashBwdParams, FlashFwdParams
from .preprocess import FlashBwdPreprocess

Capability = tuple[int, int]  # compute capability: (major, minor)

HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)  # head dims of the tiles; others are rounded up
LARGE_SHARED_MEMORY = ((8, 0), (8, 7), (9, 0))  # 163 KB a block or more
PACKED = ()  # packed sequences need no kernel of their own

# head dim: block_m, block_n, num_warps
FORWARD_TILES = {
    "large": {
        32: (128, 128, 4),
        64: (128, 96, 4),
        96: (128, 64, 4),
        128: (128, 64, 4),
        160: (128, 64, 8),
        192: (128, 64, 8),
        256: (128, 64, 8),
    },
    "small": {
        32: (128, 128, 4),
        64: (128, 96, 4),
        96: (128, 64, 4),
        128: (128, 64, 8),
        160: (128, 64, 8),
        192: (128, 64, 8),
        256: (64, 64, 4),
    },
    "turing": {
        32: (64, 64, 4),
        64: (64, 64, 4),
        96: (64, 64, 4),
        128: (64, 64, 4),
        160: (64, 32, 4),
        192: (64, 32, 4),
        256: (64, 16, 4),
    },
}
# The softcap takes the last registers of the widest tile, on Turing ALiBi as well.
FORWARD_TILES_SOFTCAP = {64: (128, 64, 4)}
FORWARD_TILES_SCORE_TURING = {64: (64, 48, 4)}

# head dim: block_m, block_n, num_warps, num_stages
BACKWARD_TILES = {
    "large": {
        32: (128, 128, 8, 2),
        64: (128, 128, 8, 2),
        96: (64, 128, 8, 2),
        128: (64, 128, 8, 2),
        160: (64, 64, 8, 2),
        192: (64, 64, 8, 1),
        256: (64, 64, 8, 1),
    },
    "small": {
        32: (64, 128, 8, 2),
        64: (64, 128, 8, 2),
        96: (64, 64, 8, 2),
        128: (64, 64, 8, 1),
        160: (64, 64, 8, 1),
        192: (64, 32, 8, 1),
        256: (32, 32, 4, 1),
    },
    # No entry for 256: its smallest tiles need more than Turing's 64 KB, and simt serves.
    "turing": {
        32: (64, 64, 4, 1),
        64: (64, 64, 4, 1),
        96: (64, 32, 4, 1),
        128: (64, 32, 4, 1),
        160: (32, 32, 4, 1),
        192: (32, 32, 4, 1),
    },
}
# For Blackwell ptxas needs a few more registers: narrower tiles, where the others would spill. The
# smallest tiles of head dim 256 spill on sm_120 all the same, and simt serves.
FORWARD_TILES["sm100"] = FORWARD_TILES["large"] | {64: (128, 64, 4), 128: (128, 64, 8)}
FORWARD_TILES["sm120"] = FORWARD_TILES["small"]
BACKWARD_TILES["sm100"] = {
    32: (64, 64, 8, 2),
    64: (64, 128, 8, 2),
    96: (64, 64, 8, 2),
    128: (64, 64, 8, 2),
    160: (64, 64, 8, 2),
    192: (64, 64, 8, 1),
    256: (64, 32, 8, 1),
}
BACKWARD_TILES["sm120"] = BACKWARD_TILES["small"] | {32: (128, 64, 8, 2)}
del BACKWARD_TILES["sm120"][256]

# The derivative of the softcap, and ALiBi, need registers that the widest tiles do not leave.
BACKWARD_TILES_SCORE = {64: (64, 128, 8, 2), 96: (64, 64, 8, 2), 128: (64, 64, 8, 2)}


@dataclasses.dataclass(frozen=True)
class FlashFwdSm80(KernelConfig):
    """Forward: a block computes ``block_m`` query rows of one head."""

    source: ClassVar[str] = "attention/flash_fwd_sm80.cu"
    params: ClassVar[type[FlashFwdParams]] = FlashFwdParams

    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    arch: int
    softcap: bool
    alibi: bool
    smem_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_warps * 32

    def grid(self, shape: AttentionShape) -> int:
        """Number of blocks."""
        return -(-shape.seqlen_q // self.block_m) * shape.heads_q * shape.batch


@dataclasses.dataclass(frozen=True)
class FlashBwdSm80(KernelConfig):
    """Backward: a block computes dK and dV of ``block_n`` keys and adds its share to dQ."""

    source: ClassVar[str] = "attention/flash_bwd_sm80.cu"
    params: ClassVar[type[FlashBwdParams]] = FlashBwdParams

    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    arch: int
    softcap: bool
    alibi: bool
    smem_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_warps * 32

    def grid(self, shape: AttentionShape) -> int:
        """Number of blocks."""
        return -(-shape.seqlen_k // self.block_n) * shape.heads_kv * shape.batch


@dataclasses.dataclass(frozen=True)
class FlashBwdPostprocessSm80(KernelConfig):
    """Backward, last: dQ from its float32 accumulator; tiles and warps as in ``FlashBwdSm80``."""

    source: ClassVar[str] = "attention/flash_bwd_postprocess_sm80.cu"
    params: ClassVar[type[FlashBwdParams]] = FlashBwdParams

    dtype: str
    head_dim: int
    block_m: int
    num_warps: int
    arch: int
    smem_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_warps * 32

    def grid(self, shape: AttentionShape) -> int:
        """Number of blocks."""
        return -(-shape.seqlen_q // self.block_m) * shape.heads_q * shape.batch


def dtypes(capability: Capability) -> tuple[str, ...]:
    """What this family computes on a GPU."""
    if capability >= (8, 0):
        return ("float16", "bfloat16")
    return ("float16",) if capability >= (7, 5) else ()


def supports(
    dtype: str, head_dim: int, access: Access, capability: Capability, *, backward: bool
) -> bool:
    """Whether this family computes a pass of such a problem; it copies 16 bytes at a time."""
    widest = max((BACKWARD_TILES if backward else FORWARD_TILES)[_tiles(capability)])
    return dtype in dtypes(capability) and head_dim <= widest and access >= Access.VECTOR


def forward(dtype: str, head_dim: int, features: Features, capability: Capability) -> FlashFwdSm80:
    """The forward kernel."""
    padded = _padded(head_dim)
    tile = FORWARD_TILES[_tiles(capability)][padded]
    if capability < (8, 0):
        if features.softcap or features.alibi:
            tile = FORWARD_TILES_SCORE_TURING.get(padded, tile)
    elif features.softcap:
        tile = FORWARD_TILES_SOFTCAP.get(padded, tile)
    block_m, block_n, num_warps = tile
    smem_bytes = (block_m + 2 * block_n) * padded * 2
    switches = (features.softcap, features.alibi)
    return FlashFwdSm80(dtype, padded, *tile, _arch(capability), *switches, smem_bytes)


def backward(
    dtype: str, head_dim: int, features: Features, capability: Capability
) -> tuple[FlashBwdPreprocess, FlashBwdSm80, FlashBwdPostprocessSm80]:
    """The backward kernels in launch order."""
    padded, arch = _padded(head_dim), _arch(capability)
    softcap, alibi = features.softcap, features.alibi
    tile = BACKWARD_TILES[_tiles(capability)][padded]
    if (softcap or alibi) and _tiles(capability) == "large":
        tile = BACKWARD_TILES_SCORE.get(padded, tile)
    block_m, block_n, num_warps, num_stages = tile
    smem_bytes = 2 * (2 * (block_n + num_stages * block_m) * padded + 2 * block_m * block_n)
    return (
        FlashBwdPreprocess(dtype, accum_dim=padded),
        FlashBwdSm80(dtype, padded, *tile, arch, softcap, alibi, smem_bytes),
        FlashBwdPostprocessSm80(dtype, padded, block_m, num_warps, arch, block_m * padded * 2),
    )


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Every configuration that ``forward`` and ``backward`` can pick, each once."""
    seen = set()
    for dtype, head_dim, softcap, alibi in itertools.product(
        dtypes(capability), HEAD_DIMS, (False, True), (False, True)
    ):
        problem = (dtype, head_dim, Features(softcap, alibi), capability)
        kernels = [forward(*problem)]
        if supports(dtype, head_dim, Access.VECTOR, capability, backward=True):
            kernels += backward(*problem)
        yield from (config for config in kernels if config not in seen)
        seen.update(kernels)


def _tiles(capability: Capability) -> str:
    if capability < (8, 0):
        return "turing"
    if capability in LARGE_SHARED_MEMORY:
        return "large"
    if capability >= (12, 0):
        return "sm120"
    return "sm100" if capability >= (10, 0) else "small"


def _arch(capability: Capability) -> int:
    return 80 if capability >= (8, 0) else 75


def _padded(head_dim: int) -> int:
    return next(size for size in HEAD_DIMS if size >= head_dim)
