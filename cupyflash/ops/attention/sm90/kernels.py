"""The kernels of the backend ``sm90``: template parameters, threads and boxes of tensor maps.

forward.py and backward.py choose among them.
"""

import ctypes
import dataclasses
from typing import ClassVar, NamedTuple

from ....runtime.structs import header
from ..kernels import AttentionKernel
from ..kind import BIAS_KINDS, KEY_MASK, Features

structs = header("attention/params.cuh")
pages = header("attention/sm90/key_pages.cuh")

WARPGROUP = header("ptx/warpgroup.cuh").WARPGROUP  # threads
# The kinds of bias of which TMA loads tiles, without and with a key mask.
BIAS_BY_TMA = (
    BIAS_KINDS.index("DTYPE_OF_Q_BY_TMA"),
    BIAS_KINDS.index("KEY_MASK_AND_DTYPE_OF_Q_BY_TMA"),
)
# The kind of a bias by TMA whose gradient the backward stores.
STORED_GRADIENT = BIAS_KINDS.index("STORED_GRADIENT")
# The (head dim, head dim of v and out) of kernels that take v without padding.
NARROW_V = ((192, 128),)


class Fragment(NamedTuple):
    """The scores of a warp in a tile: 16 rows.

    Attributes:
        rows_are_keys: its rows are keys, and its columns queries.
        columns: how many it has, a divisor of those of the tile.
    """

    rows_are_keys: bool
    columns: int


@dataclasses.dataclass(frozen=True)
class PagedKernel(AttentionKernel):
    """The base of kernels that may take keys in pages.

    Attributes:
        paged: it does; `PagesOfKeys` of key_pages.cuh then is in front of its argument.
    """

    paged: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def header(self) -> str:
        return "#define KEYS_IN_PAGES\n" * self.paged + super().header

    @property
    def argument_size(self) -> int:
        return super().argument_size + ctypes.sizeof(pages.PagesOfKeys) * self.paged


@dataclasses.dataclass(frozen=True)
class FlashFwdSm90(PagedKernel):
    """Forward: warpgroups of 64 rows each compute a tile, another one loads it.

    Attributes:
        head_dim_v: of v and out: ``head_dim``, or one of `NARROW_V`.
    """

    source: ClassVar[str] = "attention/sm90/flash_fwd_sm90.cu"

    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    q_stages: int
    kv_stages: int
    softcap: bool
    alibi: bool
    bias: int
    dropout: bool
    split: bool
    smem_bytes: int

    @property
    def threads(self) -> int:
        return (self.block_m // 64 + 1) * WARPGROUP

    @property
    def fragment(self) -> Fragment:
        return Fragment(rows_are_keys=False, columns=self.block_n)

    @property
    def boxes(self) -> dict[str, int]:
        return {"q": 64, "k": self.block_n, "v": self.block_n, "out": 64}

    @property
    def bias_box_rows(self) -> int:
        """Rows of a box of the map of the bias: the 64 of a warpgroup."""
        return 64 if self.bias in BIAS_BY_TMA else 0


@dataclasses.dataclass(frozen=True)
class FlashFwdCombineSm90(AttentionKernel):
    """Forward, where blocks have shared the keys of a tile: puts their results together."""

    source: ClassVar[str] = "attention/sm90/flash_fwd_combine_sm90.cu"
    dependent: ClassVar[bool] = True

    dtype: str
    head_dim: int
    rows: int

    @property
    def threads(self) -> int:
        return self.rows * 32

    def grid(self, shape: structs.AttentionShape) -> int:
        return -(-shape.seqlen_q // self.rows) * shape.heads_q * shape.batch


class MainKernel(AttentionKernel):
    """The base of both: a tile of ``block_n`` keys walks over ``block_m`` queries at a time.

    Attributes:
        stores_dbias: it stores the gradient of the bias, in the dtype of q, instead of adding to
            it.
        whole_heads: a block takes all keys of a head (`BwdHeadTile`); ``dq_accum`` then has one
            place for each block.
        bias_box_rows: rows of a box of the map of the bias; 0 without a map.
        walks_up: blocks walk from the first query to the last (`BwdWalkingTile`).
    """

    tiles_of: ClassVar[str] = "k"
    stores_dbias: ClassVar[bool] = False
    whole_heads: ClassVar[bool] = False
    bias_box_rows: ClassVar[int] = 0

    @property
    def boxes(self) -> dict[str, int]:
        return {"q": self.block_m, "k": self.block_n, "v": self.block_n, "dout": self.block_m}


@dataclasses.dataclass(frozen=True)
class FlashBwdSm90(MainKernel):
    """Backward: a block computes dK and dV of ``block_n`` keys at a time, a warpgroup of 64."""

    source: ClassVar[str] = "attention/sm90/flash_bwd_sm90.cu"

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
        return (self.block_n // 64 + 1) * WARPGROUP

    @property
    def fragment(self) -> Fragment:
        return Fragment(rows_are_keys=True, columns=self.block_m)

    @property
    def stores_dbias(self) -> bool:
        """Whether it stores the gradient of the bias instead of adding to it."""
        return self.bias == STORED_GRADIENT

    @property
    def bias_box_rows(self) -> int:
        """Rows of a box of the map of the bias: all queries of a step."""
        return self.block_m if self.bias in (*BIAS_BY_TMA, STORED_GRADIENT) else 0


@dataclasses.dataclass(frozen=True)
class FlashBwdWideSm90(MainKernel):
    """Backward for wide heads: ``groups`` warpgroups share the columns of dK and dV.

    Attributes:
        head_dim_v: of v, dout and dv: ``head_dim``, or one of `NARROW_V`.
    """

    source: ClassVar[str] = "attention/sm90/flash_bwd_wide_sm90.cu"

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
        return (self.groups + 1) * WARPGROUP

    @property
    def fragment(self) -> Fragment:
        return Fragment(rows_are_keys=False, columns=self.block_n // self.groups)


@dataclasses.dataclass(frozen=True)
class FlashBwdPostprocessSm90(AttentionKernel):
    """Backward, last: dQ from its float32 accumulator; a block converts 64 rows of one head."""

    source: ClassVar[str] = "attention/sm90/flash_bwd_postprocess_sm90.cu"

    dtype: str
    head_dim: int

    @property
    def threads(self) -> int:
        return -(-self.head_dim // 64) * WARPGROUP

    def grid(self, shape: structs.AttentionShape) -> int:
        return -(-shape.seqlen_q // 64) * shape.heads_q * shape.batch


@dataclasses.dataclass(frozen=True)
class SequenceMapsSm90(PagedKernel):
    """A tensor map for each packed sequence, before the forward and the backward kernels."""

    source: ClassVar[str] = "attention/sm90/sequence_maps_sm90.cu"

    num_maps: int

    @property
    def threads(self) -> int:
        return self.num_maps * 32

    def grid(self, shape: structs.AttentionShape) -> int:
        return shape.batch


SEQUENCE_MAPS = SequenceMapsSm90(num_maps=4)
MAPS_OF_PAGES = dataclasses.replace(SEQUENCE_MAPS, paged=True)


def narrow_head_dim(head_dim: int, features: Features) -> int | None:
    """The head dim of the kernels that take v as narrow as it is, or None."""
    if any(features.switches) or features.text:
        return None
    found = (size for size, v in NARROW_V if v == features.head_dim_v and v < head_dim <= size)
    return next(found, None)


def bias_kind(features: Features) -> int:
    """The kind of bias of kernels that have TMA load it where it can, not beside a text."""
    by_tma = features.bias_by_tma and not features.text
    return BIAS_BY_TMA[features.bias >= KEY_MASK] if by_tma else features.bias


def shared_columns(width: int) -> int:
    """Columns of a tile in shared memory: one TMA tile of 32, or whole ones of 64."""
    return 32 if width <= 32 else -(-width // 64) * 64
