"""Backend ``sm80``: mma.sync tensor cores, float16 and bfloat16 (Turing: float16 only)."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ...runtime.config import KernelConfig
from ...runtime.gpu import Capability, architecture
from ...runtime.structs import header
from ..features import Access, Features
from .preprocess import FlashBwdPreprocess
from .sm80_tiles import HEAD_DIMS, backward_tiles, forward_tiles

structs = header("attention/params.cuh")

PACKED = ()  # packed sequences need no kernel of their own


@dataclasses.dataclass(frozen=True)
class FlashFwdSm80(KernelConfig):
    """Forward: a block computes ``block_m`` query rows of one head."""

    source: ClassVar[str] = "attention/flash_fwd_sm80.cu"
    params: ClassVar[type[structs.FlashFwdParams]] = structs.FlashFwdParams

    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    arch: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool
    smem_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_warps * 32

    def grid(self, shape: structs.AttentionShape) -> int:
        """Number of blocks."""
        return -(-shape.seqlen_q // self.block_m) * shape.heads_q * shape.batch


@dataclasses.dataclass(frozen=True)
class FlashBwdSm80(KernelConfig):
    """Backward: a block computes dK and dV of ``block_n`` keys and adds its share to dQ."""

    source: ClassVar[str] = "attention/flash_bwd_sm80.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams

    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    arch: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool
    smem_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_warps * 32

    def grid(self, shape: structs.AttentionShape) -> int:
        """Number of blocks."""
        return -(-shape.seqlen_k // self.block_n) * shape.heads_kv * shape.batch


@dataclasses.dataclass(frozen=True)
class FlashBwdPostprocessSm80(KernelConfig):
    """Backward, last: dQ from its float32 accumulator; tiles and warps as in ``FlashBwdSm80``."""

    source: ClassVar[str] = "attention/flash_bwd_postprocess_sm80.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams

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

    def grid(self, shape: structs.AttentionShape) -> int:
        """Number of blocks."""
        return -(-shape.seqlen_q // self.block_m) * shape.heads_q * shape.batch


def supports(
    dtype: str,
    head_dim: int,
    access: Access,
    features: Features,
    capability: Capability,
    *,
    backward: bool,
) -> bool:
    """Whether this backend computes a pass of such a problem; it copies 16 bytes at a time."""
    tiles = (backward_tiles if backward else forward_tiles)(features, capability)
    fits = (
        dtype in architecture(capability).mma_dtypes
        and head_dim <= max(tiles)
        and not features.wide_softcap
    )
    return fits and access >= Access.VECTOR


def forward(dtype: str, head_dim: int, features: Features, capability: Capability) -> FlashFwdSm80:
    """The forward kernel."""
    padded = _padded(head_dim)
    tile = forward_tiles(features, capability)[padded]
    block_m, block_n, _ = tile
    smem_bytes = (block_m + 2 * block_n) * padded * 2
    return FlashFwdSm80(
        dtype, padded, *tile, architecture(capability).mma, *_switches(features), smem_bytes
    )


def backward(
    dtype: str, head_dim: int, features: Features, capability: Capability
) -> tuple[FlashBwdPreprocess, FlashBwdSm80, FlashBwdPostprocessSm80]:
    """The backward kernels in launch order."""
    padded, arch = _padded(head_dim), architecture(capability).mma
    tile = backward_tiles(features, capability)[padded]
    block_m, block_n, num_warps, num_stages = tile
    smem_bytes = 2 * (2 * (block_n + num_stages * block_m) * padded + 2 * block_m * block_n)
    return (
        FlashBwdPreprocess(dtype, accum_dim=padded),
        FlashBwdSm80(dtype, padded, *tile, arch, *_switches(features), smem_bytes),
        FlashBwdPostprocessSm80(dtype, padded, block_m, num_warps, arch, block_m * padded * 2),
    )


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Every configuration that ``forward`` and ``backward`` can pick, each once."""
    seen = set()
    both = (False, True)
    for dtype, head_dim, softcap, alibi, bias, dropout in itertools.product(
        architecture(capability).mma_dtypes, HEAD_DIMS, both, both, range(4), both
    ):
        features = Features(softcap, alibi, bias=bias, dropout=dropout)
        problem = (dtype, head_dim, features, capability)
        kernels = [forward(*problem)]
        if supports(dtype, head_dim, Access.VECTOR, features, capability, backward=True):
            kernels += backward(*problem)
        yield from (config for config in kernels if config not in seen)
        seen.update(kernels)


def _switches(features: Features) -> tuple[bool, bool, int, bool]:
    return (features.softcap, features.alibi, features.bias, features.dropout)


def _padded(head_dim: int) -> int:
    return next(size for size in HEAD_DIMS if size >= head_dim)
