"""The kernels of the backend ``fp16x3``, their tiles, and which ones a problem has."""

import dataclasses
from typing import ClassVar

from ....runtime.config import KernelConfig
from ....runtime.gpu import Capability, architecture
from ....runtime.structs import header
from ..kernels import AttentionKernel, FlashBwdPreprocess, Tile
from ..kind import Features, Kind
from ..simt import kernels as simt

structs = header("attention/fp16x3/params.cuh")
rows = header("attention/fp16x3/rows.cuh")

MAX_TF32_HEAD_DIM = 128
HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # head dims of the tiles; others are rounded up

# These tiles are the largest that compile without spills, by shared memory. Head dims without a
# tile are left to the kernels for CUDA cores.
# head dim: block_m, block_n, num_warps
FORWARD_TILES = {
    "large": {
        32: (128, 64, 4),
        64: (128, 64, 8),
        96: (128, 48, 8),
        128: (128, 48, 8),
        192: (128, 16, 8),
        256: (128, 16, 8),
    },
    "small": {
        32: (128, 32, 4),
        64: (128, 64, 8),
        96: (128, 48, 8),
        128: (64, 48, 4),
        192: (64, 16, 4),
        256: (64, 16, 4),
    },
    "turing": {
        32: (64, 64, 4),
        64: (64, 32, 4),
        96: (64, 32, 4),
        128: (64, 16, 4),
    },
}
# This tile is faster for head dim 64 and "large", but spills with options.
FORWARD_TILE_PLAIN = (128, 32, 4)
# head dim: block_m, block_n, num_warps, num_stages; head dims of simt
BACKWARD_TILES = {
    "large": {
        32: (64, 128, 8, 2),
        64: (64, 64, 8, 2),
        128: (64, 64, 8, 1),
    },
    "small": {
        32: (64, 64, 8, 1),
        64: (64, 64, 8, 1),
    },
    "turing": {
        32: (64, 32, 4, 1),
        64: (32, 32, 4, 1),
    },
}
for table in (FORWARD_TILES, BACKWARD_TILES):
    table["sm100"], table["sm120"] = dict(table["large"]), dict(table["small"])
# These serve head dim 128 where the large tile spills: the second on sm_90a, the first elsewhere.
NARROW_TILE, NARROW_TILE_SM90 = (32, 64, 8, 1), (64, 32, 8, 1)
# Only sm_90a has the shared memory and the registers for head dim 256.
WIDE_HEAD_DIM, WIDE_TILE_SM90 = 256, (64, 32, 8, 1)
del FORWARD_TILES["sm100"][256], FORWARD_TILES["sm120"][256]
# The others that `python -m cupyflash tune` tries, whatever the head dim.
FORWARD_CANDIDATES = (
    *((64, 16, 4), (64, 32, 4), (64, 64, 4), (128, 16, 8), (128, 32, 4), (128, 32, 8)),
    *((128, 48, 8), (128, 64, 4), (128, 64, 8)),
)
BACKWARD_CANDIDATES = (
    *((32, 64, 4, 1), (64, 32, 4, 1), (64, 64, 8, 1), (64, 64, 8, 2)),
    *((64, 128, 8, 1), (64, 128, 8, 2)),
)


class RowsKernel(AttentionKernel):
    """A kernel that reads the rows of all inputs."""

    threads: ClassVar[int] = rows.SPLIT_WARPS * 32

    def grid(self, shape: structs.AttentionShape, backward: bool) -> int:
        blocks_q = -(-shape.seqlen_q // rows.SPLIT_ROWS) * shape.heads_q
        blocks_k = -(-shape.seqlen_k // rows.SPLIT_ROWS) * shape.heads_kv
        return ((2 if backward else 1) * blocks_q + 2 * blocks_k) * shape.batch


@dataclasses.dataclass(frozen=True)
class Fp16x3Ranges(RowsKernel):
    """First: finds the range of every head."""

    source: ClassVar[str] = "attention/fp16x3/fp16x3_ranges.cu"

    head_dim: int


@dataclasses.dataclass(frozen=True)
class Fp16x3Split(RowsKernel):
    """Second: writes the float16 parts of the tensors."""

    source: ClassVar[str] = "attention/fp16x3/fp16x3_split.cu"

    head_dim: int
    parts: int
    arch: int


class SplitKernel(AttentionKernel):
    """A main kernel, which reads the float16 parts of its inputs."""

    @property
    def before(self) -> tuple[RowsKernel, ...]:
        """The kernels that split its inputs."""
        return (Fp16x3Ranges(self.head_dim), Fp16x3Split(self.head_dim, self.parts, self.arch))

    @property
    def after(self) -> tuple[AttentionKernel, ...]:
        """The kernels that follow it, with the same argument."""
        return ()

    def fallback(self, capability: Capability) -> tuple[AttentionKernel, ...]:
        """The kernels for CUDA cores, which compute the sequences that cannot be split."""
        options = {"bias": self.bias, "dropout": self.dropout, "text": self.text}
        features = Features(self.softcap, self.alibi, **options)
        kind = Kind("float32", self.head_dim, features, capability)
        if self.tiles_of == "q":
            return (simt.forward_kernel(kind),)
        return simt.backward_kernels(kind)[1:]


@dataclasses.dataclass(frozen=True)
class FlashFwdFp16x3(SplitKernel):
    """Forward: a block computes ``block_m`` query rows of one head."""

    source: ClassVar[str] = "attention/fp16x3/flash_fwd_fp16x3.cu"

    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    parts: int
    arch: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool
    smem_bytes: int


@dataclasses.dataclass(frozen=True)
class FlashBwdPostprocessFp16x3(AttentionKernel):
    """Backward, last: dQ from its accumulator; tiles and warps as in ``FlashBwdFp16x3``."""

    source: ClassVar[str] = "attention/fp16x3/flash_bwd_postprocess_fp16x3.cu"

    head_dim: int
    block_m: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class FlashBwdFp16x3(SplitKernel):
    """Backward: a block computes dK and dV of ``block_n`` keys and adds its share to dQ."""

    source: ClassVar[str] = "attention/fp16x3/flash_bwd_fp16x3.cu"
    tiles_of: ClassVar[str] = "k"

    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    parts: int
    arch: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool
    smem_bytes: int

    @property
    def after(self) -> tuple[AttentionKernel, ...]:
        """The kernels that follow it, with the same argument."""
        return (FlashBwdPostprocessFp16x3(self.head_dim, self.block_m, self.num_warps),)


def forward_kernel(kind: Kind, tile: Tile | None = None) -> FlashFwdFp16x3:
    """The forward kernel, with the built-in tile unless another is given."""
    padded = _padded(kind.head_dim)
    parts = _parts(padded, kind.features, kind.capability)
    block_m, block_n, _ = tile = tile or _forward_tile(kind)
    smem_bytes = parts * (block_m + 2 * block_n) * padded * 2
    arch = architecture(kind.capability).mma
    switches = kind.features.with_bool_mask.switches
    sizes, text = (padded, *tile, parts, arch), kind.features.text
    return FlashFwdFp16x3(*sizes, *switches, smem_bytes, text=text)


def backward_kernels(
    kind: Kind, tile: Tile | None = None
) -> tuple[FlashBwdPreprocess, FlashBwdFp16x3]:
    """The backward kernels in launch order; `FlashBwdFp16x3.after` follows them.

    They have the built-in tile unless another is given.
    """
    padded = backward_head_dim(kind)
    parts = _parts(padded, kind.features, kind.capability)
    tile = tile or _backward_tile(kind)
    block_m, block_n, _, num_stages = tile
    elements = 2 * (block_n + num_stages * block_m) * padded + 2 * block_m * block_n
    switches = kind.features.with_bool_mask.switches
    arch = architecture(kind.capability).mma
    return (
        FlashBwdPreprocess(kind.dtype, accum_dim=padded),
        FlashBwdFp16x3(
            *(padded, *tile, parts, arch, *switches, parts * elements * 2),
            text=kind.features.text,
        ),
    )


def forward_candidates(kind: Kind) -> dict[Tile, KernelConfig]:
    """The kernel by the tiles that `tune` may choose from, the built-in one first."""
    return {tile: forward_kernel(kind, tile) for tile in (_forward_tile(kind), *FORWARD_CANDIDATES)}


def backward_candidates(kind: Kind) -> dict[Tile, KernelConfig]:
    """The main kernel of the backward by tile, the built-in one first."""
    tiles = (_backward_tile(kind), *BACKWARD_CANDIDATES)
    return {tile: backward_kernels(kind, tile)[1] for tile in tiles}


def backward_head_dim(kind: Kind) -> int:
    """The kernels for CUDA cores add to the same accumulator of dQ, so both have one head dim."""
    of_simt = simt.backward_head_dim("float32", kind.head_dim, kind.features)
    return max(_padded(kind.head_dim), of_simt)


def widest(capability: Capability, *, backward: bool) -> int:
    """The widest head of a pass, if it has no options."""
    arch = architecture(capability)
    if backward and arch.wgmma:
        return WIDE_HEAD_DIM
    return max((BACKWARD_TILES if backward else FORWARD_TILES)[arch.tiles])


def _forward_tile(kind: Kind) -> Tile:
    """The built-in choice."""
    features, padded = kind.features, _padded(kind.head_dim)
    tiles = architecture(kind.capability).tiles
    plain = not any((*features.with_bool_mask.switches, features.text))
    if padded == 64 and tiles == "large" and plain and not features.tf32:
        return FORWARD_TILE_PLAIN
    return FORWARD_TILES[tiles][padded]


def _backward_tile(kind: Kind) -> Tile:
    """The built-in choice."""
    padded = backward_head_dim(kind)
    if padded == WIDE_HEAD_DIM:
        return WIDE_TILE_SM90
    if padded == 128 and not architecture(kind.capability).wgmma:
        return NARROW_TILE
    if padded == 128:  # the large tile spills
        return NARROW_TILE_SM90
    return BACKWARD_TILES[architecture(kind.capability).tiles][padded]


def _parts(head_dim: int, features: Features, capability: Capability) -> int:
    """Turing has no TF32, and wide heads have no registers for it in ptxas's schedule."""
    tf32 = features.tf32 and architecture(capability).mma >= 80 and head_dim <= MAX_TF32_HEAD_DIM
    return 1 if tf32 else 2


def _padded(head_dim: int) -> int:
    return next(size for size in HEAD_DIMS if size >= head_dim)
