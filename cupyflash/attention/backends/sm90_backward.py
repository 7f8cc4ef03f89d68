"""Backward kernels of the backend ``sm90``: two main kernels, by the width of the heads."""

import dataclasses
from typing import ClassVar

from ...runtime.config import KernelConfig
from ...runtime.gpu import Capability
from ...runtime.structs import header
from ..problem import KEY_MASK, Features
from .config import AttentionKernel, FlashBwdCombine, FlashBwdPreprocess, Tile

structs = header("attention/params.cuh")

WARPGROUP = header("ptx/warpgroup.cuh").WARPGROUP  # threads
NUM_STAGES = 2  # of Q and dO
KEY_MASK_HEADER = "attention/key_mask_sm90.cuh"
# The kinds of bias of which TMA loads tiles, without and with a key mask.
BIAS_BY_TMA = (
    header("attention/bias.cuh").BiasKind.index("DTYPE_OF_Q_BY_TMA"),
    KEY_MASK + header("attention/key_mask.cuh").KeyMaskKind.index("WITH_DTYPE_OF_Q_BY_TMA"),
)
# The kind of a bias by TMA whose gradient the kernel stores, and the header that defines it.
STORED_GRADIENT_HEADER = "attention/stored_gradient_sm90.cuh"
STORED_GRADIENT = (
    KEY_MASK
    + len(header("attention/key_mask.cuh").KeyMaskKind)
    + header(STORED_GRADIENT_HEADER).StoredGradientKind.index("DTYPE_OF_Q_BY_TMA")
)

# head dim: block_m, block_n
TILES = {32: (128, 128), 64: (128, 128), 96: (64, 128), 128: (64, 128)}
# A key mask beside a bias takes the last registers of the widest tile.
TILES_KEY_MASK = TILES | {64: (64, 128)}
# The derivative of the softcap, or dropout, needs registers that the widest tile does not leave.
TILES_ONE = TILES | {32: (64, 128), 64: (64, 128)}
# Several of them, or a bias beside one, need more than a warpgroup has that owns 128 columns of dK
# and dV.
TILES_SEVERAL = {32: (64, 128), 64: (64, 128), 96: (64, 128)}
# Three options or more leave no tile of head dim 96 here; the kernel for wide heads takes it.
TILES_MANY = {32: (64, 128), 64: (64, 128)}

# head dim: block_m, block_n, groups
WIDE_TILES = {192: (64, 96, 3), 256: (64, 80, 2)}
# Three warpgroups have no registers for the derivative of the softcap, a bias or dropout.
WIDE_TILES_SCORE = {128: (64, 64, 2), 256: (64, 64, 2)}
# (head dim, that of v and out): block_m, block_n, groups
NARROW_V_TILES = {(192, 128): (64, 96, 2)}
# The others that `python -m cupyflash tune` tries.
CANDIDATES = {128: ((64, 64, 2),), 256: ((64, 64, 2),)}


class MainKernel(AttentionKernel):
    """The base of both: a tile of ``block_n`` keys walks over ``block_m`` queries at a time."""

    params: ClassVar[type[structs.FlashBwdSm90Params]] = structs.FlashBwdSm90Params
    persistent: ClassVar[bool] = True
    divides_rows: ClassVar[bool] = True
    key_mask_header: ClassVar[str] = KEY_MASK_HEADER
    tiles_of: ClassVar[str] = "k"

    def walking_up(self) -> KernelConfig:
        """The same for blocks that walk from the first query to the last (`BwdWalkingTile`)."""
        return self if self.stores_dbias else dataclasses.replace(self, walks_up=True)

    def launched(self, capability: Capability) -> tuple[KernelConfig, ...]:
        """This configuration and those that are launched in its place."""
        instead = (self.storing_dbias(), self.walking_up(), self.taking_heads())
        return tuple(dict.fromkeys((self, *instead)))

    @property
    def boxes(self) -> dict[str, int]:
        """Rows of a box of each tensor map."""
        return {"q": self.block_m, "k": self.block_n, "v": self.block_n, "dout": self.block_m}


@dataclasses.dataclass(frozen=True)
class FlashBwdSm90(MainKernel):
    """Backward: a block computes dK and dV of ``block_n`` keys at a time, a warpgroup of 64."""

    source: ClassVar[str] = "attention/flash_bwd_sm90.cu"

    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_stages: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool
    smem_bytes: int
    walks_up: bool = False
    whole_heads: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.block_n // 64 + 1) * WARPGROUP

    @property
    def stores_dbias(self) -> bool:
        """Whether the kernel stores the gradient of the bias, instead of adding to it."""
        return self.bias == STORED_GRADIENT

    @property
    def takes_key_mask(self) -> bool:
        """Whether ``params.bias`` points to the record of a key mask."""
        return super().takes_key_mask and not self.stores_dbias

    @property
    def header(self) -> str:
        """The header that defines the kind of the bias."""
        return STORED_GRADIENT_HEADER if self.stores_dbias else super().header

    @property
    def bias_box_rows(self) -> int:
        """Rows of a box of the map of the bias: all queries of a step."""
        return self.block_m if self.bias in (*BIAS_BY_TMA, STORED_GRADIENT) else 0

    def launched(self, capability: Capability) -> tuple[KernelConfig, ...]:
        """As those of the base, and the preprocess of blocks that take whole heads."""
        before = FlashBwdPreprocess(self.dtype, self.head_dim).taking_heads()
        has_one = self.taking_heads() != self
        return (*super().launched(capability), *((before,) if has_one else ()))

    def taking_heads(self) -> KernelConfig:
        """The same for blocks that take whole heads (`BwdHeadTile`); itself unless it is plain."""
        options = self.softcap or self.alibi or self.bias or self.dropout
        return self if options else dataclasses.replace(self, whole_heads=True)

    def storing_dbias(self) -> KernelConfig:
        """The same for a gradient of the bias that is dS; itself if it can only add to it."""
        if self.bias != BIAS_BY_TMA[0] or self.softcap:
            return self
        return dataclasses.replace(self, bias=STORED_GRADIENT)


@dataclasses.dataclass(frozen=True)
class FlashBwdWideSm90(MainKernel):
    """The same for wide heads: ``groups`` warpgroups share the columns of dK and dV.

    Attributes:
        head_dim_v: of v, dout and dv: ``head_dim``, or one of `NARROW_V_TILES`.
    """

    source: ClassVar[str] = "attention/flash_bwd_wide_sm90.cu"

    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    num_stages: int
    groups: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool
    smem_bytes: int
    walks_up: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.groups + 1) * WARPGROUP


@dataclasses.dataclass(frozen=True)
class FlashBwdPostprocessSm90(AttentionKernel):
    """Backward, last: dQ from its float32 accumulator; a block converts 64 rows of one head."""

    source: ClassVar[str] = "attention/flash_bwd_postprocess_sm90.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams

    dtype: str
    head_dim: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return -(-self.head_dim // 64) * WARPGROUP

    def taking_heads(self) -> None:
        """Blocks that take whole heads write dq themselves."""

    def grid(self, shape: structs.AttentionShape) -> int:
        """Number of blocks."""
        return -(-shape.seqlen_q // 64) * shape.heads_q * shape.batch


def backward(
    dtype: str, head_dim: int, features: Features, tile: Tile | None = None
) -> tuple[KernelConfig, ...]:
    """The backward kernels in launch order, with the built-in tile unless another is given."""
    padded, built_in = _built_in(head_dim, features)
    tile = tile or built_in
    softcap, alibi, _, dropout = features.switches
    if len(tile) == 2:
        main = _main(dtype, padded, *tile, (softcap, alibi, bias_kind(features), dropout))
    else:
        head_dim_v = features.head_dim_v or padded
        main = _main_wide(dtype, padded, head_dim_v, tile, features.switches)
    return (
        FlashBwdPreprocess(dtype, accum_dim=padded),
        main,
        FlashBwdPostprocessSm90(dtype, padded),
        FlashBwdCombine(dtype, padded),
    )


def candidates(head_dim: int, features: Features) -> tuple[Tile, ...]:
    """The tiles that `backward` takes, the built-in choice first."""
    padded, built_in = _built_in(head_dim, features)
    return (built_in, *(() if features.head_dim_v else CANDIDATES.get(padded, ())))


def narrow_v_tile(head_dim: int, features: Features) -> tuple[int, Tile] | None:
    """The head dim of the kernel that takes v as narrow as it is, and its tile; or None."""
    if any(features.switches):
        return None
    found = (
        (size, tile)
        for (size, size_v), tile in NARROW_V_TILES.items()
        if size_v == features.head_dim_v and size_v < head_dim <= size
    )
    return next(found, None)


def _built_in(head_dim: int, features: Features) -> tuple[int, Tile]:
    """The head dim of the kernel, and the built-in tile: of wide heads with its ``groups``."""
    softcap, alibi, bias, dropout = features.switches
    if narrow := narrow_v_tile(head_dim, features):
        return narrow
    tiles = TILES_ONE if softcap or dropout or (alibi and bias) else TILES
    if tiles is TILES and bias > KEY_MASK:
        tiles = TILES_KEY_MASK
    if softcap + dropout + bool(bias) > 1 or (softcap and alibi):
        tiles = TILES_SEVERAL
    if softcap + alibi + dropout + bool(bias) > 2:
        tiles = TILES_MANY
    wide_tiles = WIDE_TILES_SCORE if softcap or bias or dropout else WIDE_TILES
    tiles = wide_tiles | tiles
    padded = min(size for size in tiles if size >= head_dim)
    return padded, tiles[padded]


def bias_kind(features: Features) -> int:
    """The kind of bias of kernels that have TMA load it where it can."""
    return BIAS_BY_TMA[features.bias >= KEY_MASK] if features.bias_by_tma else features.bias


def _main(dtype: str, head_dim: int, block_m: int, block_n: int, switches: tuple) -> FlashBwdSm90:
    columns = shared_columns(head_dim)
    kv_bytes = 2 * block_n * columns * 2
    stage_bytes = (2 * block_m * columns + block_m * block_n) * 2  # Q, dO, dS
    dq_bytes = block_m * columns * 4
    bias_bytes = block_m * block_n * 2 if switches[2] in BIAS_BY_TMA else 0
    smem_bytes = kv_bytes + NUM_STAGES * stage_bytes + dq_bytes + bias_bytes
    return FlashBwdSm90(dtype, head_dim, block_m, block_n, NUM_STAGES, *switches, smem_bytes)


def _main_wide(
    dtype: str, head_dim: int, head_dim_v: int, tile: Tile, switches: tuple
) -> FlashBwdWideSm90:
    block_m, block_n, groups = tile
    columns = head_dim + head_dim_v
    ds_bytes = block_m * shared_columns(block_n) * 2
    smem_bytes = block_n * columns * 2 + 2 * ds_bytes  # K and V, P and dS
    if head_dim_v < head_dim:  # two stages of Q and dO; dQ
        smem_bytes += NUM_STAGES * block_m * columns * 2 + block_m * head_dim * 4
    elif groups == 3:  # two stages of each; half of dQ
        smem_bytes += NUM_STAGES * block_m * columns * 2 + block_m * head_dim * 2
    elif block_n == 80:  # room for one stage of dO; half of the dQ of one warpgroup
        smem_bytes += (NUM_STAGES + 1) * block_m * head_dim * 2 + block_m * 64 * 4
    else:
        smem_bytes += NUM_STAGES * block_m * columns * 2
    return FlashBwdWideSm90(
        dtype, head_dim, head_dim_v, block_m, block_n, NUM_STAGES, groups, *switches, smem_bytes
    )


def shared_columns(width: int) -> int:
    """Columns of a tile in shared memory: one TMA tile of 32, or whole ones of 64."""
    return 32 if width <= 32 else -(-width // 64) * 64
