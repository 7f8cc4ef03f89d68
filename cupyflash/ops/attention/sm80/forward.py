"""The forward kernel of the backend ``sm80``: its tiles, its configuration and its pass.

Tiles depend on the head dim and on the GPU: on its shared memory (A100, H100 and B200 have twice
that of consumer cards) and, on Turing, on the lack of asynchronous copies. They were measured on an
H200 for head dims 64 and 128, and from 160 on; the others, and those with a bias or dropout, are
the largest that compile without spills.
"""

import dataclasses
from typing import ClassVar

from ....runtime.config import KernelConfig
from ....runtime.gpu import Capability, architecture
from ..kernels import AttentionKernel, Tile
from ..kind import KEY_MASK, Features, Kind

Tiles = dict[int, Tile]

HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)  # head dims of the tiles; others are rounded up

# head dim: block_m, block_n, num_warps
FORWARD_TILES = {
    "large": {
        32: (128, 128, 4),
        64: (128, 96, 4),
        96: (128, 64, 4),
        128: (128, 64, 4),
        160: (64, 64, 4),
        192: (64, 64, 4),
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
FORWARD_TILES_SOFTCAP = {64: (128, 64, 4), 96: (128, 48, 4), 128: (128, 64, 8)}
FORWARD_TILES_ALIBI = {64: (128, 80, 4), 128: (128, 64, 8)}
FORWARD_TILES_SCORE_TURING = {64: (64, 48, 4)}
# Where a multiprocessor has 227 KB, two blocks of these fit.
FORWARD_TILES_227_KB = {192: (64, 80, 4), 256: (64, 64, 4)}
# ptxas needs a few more registers for Blackwell, so tiles that would spill there are narrower.
FORWARD_TILES["sm100"] = FORWARD_TILES["large"] | {64: (128, 64, 4), 128: (128, 64, 8)}
FORWARD_TILES["sm120"] = FORWARD_TILES["small"]
# These serve sequences of at most 64 queries and keys; on Turing all tiles are that small.
FORWARD_TILES_SHORT = dict.fromkeys((32, 64, 96, 128), (64, 64, 4))

# These serve a bias or dropout with any other option, because addresses, values and random numbers
# take registers.
FORWARD_TILES_BIAS = {
    "large": {
        32: (128, 64, 8),
        64: (128, 64, 4),
        96: (128, 32, 8),
        128: (128, 64, 8),
        160: (128, 64, 8),
        192: (128, 64, 8),
        256: (128, 64, 8),
    },
    "turing": FORWARD_TILES["turing"] | {64: (64, 48, 4), 96: (64, 48, 4)},
}
FORWARD_TILES_BIAS["small"] = FORWARD_TILES_BIAS["large"] | {256: (128, 32, 8)}
FORWARD_TILES_BIAS["sm100"] = FORWARD_TILES_BIAS["large"] | {32: (128, 96, 4)}
FORWARD_TILES_BIAS["sm120"] = FORWARD_TILES_BIAS["small"] | {32: (128, 96, 4)}
# The others that `python -m cupyflash tune` tries, whatever the head dim.
FORWARD_CANDIDATES = (
    *((64, 32, 4), (64, 64, 4), (128, 32, 8), (128, 64, 4), (128, 64, 8)),
    *((128, 96, 4), (128, 96, 8), (128, 128, 4), (128, 128, 8)),
)


@dataclasses.dataclass(frozen=True)
class FlashFwdSm80(AttentionKernel):
    """Forward: a block computes ``block_m`` query rows of one head."""

    source: ClassVar[str] = "attention/sm80/flash_fwd_sm80.cu"

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


def takes_short_tiles(features: Features) -> bool:
    """Whether the forward has the smallest tiles; a bias apart, options need more registers."""
    return features.one_tile and not features.changes_scores and features.bias < KEY_MASK


def forward_tiles(features: Features, capability: Capability) -> Tiles:
    """Head dim: (block_m, block_n, num_warps), for every head dim of the forward."""
    if takes_short_tiles(features) and architecture(capability).tiles != "turing":
        return forward_tiles(features._replace(one_tile=False), capability) | FORWARD_TILES_SHORT
    if features.bias or features.dropout or features.text:
        tiles = FORWARD_TILES_BIAS[architecture(capability).tiles]
        narrower = features.softcap and tiles[32][1] == 96  # it would spill on Blackwell
        return tiles | {32: (128, 64, 4)} if narrower else tiles
    tiles = FORWARD_TILES[architecture(capability).tiles]
    if architecture(capability).shared_memory == 227:
        tiles = tiles | FORWARD_TILES_227_KB
    if architecture(capability).tiles == "turing":
        return tiles | FORWARD_TILES_SCORE_TURING if features.softcap or features.alibi else tiles
    if features.softcap:
        return tiles | FORWARD_TILES_SOFTCAP
    return tiles | FORWARD_TILES_ALIBI if features.alibi else tiles


def forward_kernel(kind: Kind, tile: Tile | None = None) -> FlashFwdSm80:
    """The forward kernel, with the built-in tile unless another is given."""
    padded = padded_head_dim(kind.head_dim)
    block_m, block_n, _ = tile = tile or built_in_tile(kind)
    smem_bytes = (block_m + 2 * block_n) * padded * 2
    arch = architecture(kind.capability).mma
    features = kind.features
    switches = features.switches
    return FlashFwdSm80(kind.dtype, padded, *tile, arch, *switches, smem_bytes, text=features.text)


def forward_candidates(kind: Kind) -> dict[Tile, KernelConfig]:
    """The kernel by the tiles that `tune` may choose from, the built-in one first."""
    return {tile: forward_kernel(kind, tile) for tile in (built_in_tile(kind), *FORWARD_CANDIDATES)}


def built_in_tile(kind: Kind) -> Tile:
    """The built-in choice of the forward."""
    return forward_tiles(kind.features, kind.capability)[padded_head_dim(kind.head_dim)]


def padded_head_dim(head_dim: int) -> int:
    """The head dim of the kernel that takes this one."""
    return next(size for size in HEAD_DIMS if size >= head_dim)
