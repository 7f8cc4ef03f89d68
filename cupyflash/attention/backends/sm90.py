"""Backend ``sm90``: wgmma tensor cores fed by the copy engine of Hopper, float16 and bfloat16.

Needs compute capability 9.0 itself: its instructions (sm_90a) exist on no other GPU.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ...runtime.config import KernelConfig
from ...runtime.gpu import HALF, Capability, architecture
from ...runtime.structs import header
from ..problem import KEY_MASK, SHORT, Access, Features
from . import sm90_backward
from .config import AttentionKernel, Tile
from .sm80 import BIASES
from .sm90_backward import BIAS_BY_TMA, KEY_MASK_HEADER, WARPGROUP, bias_kind, shared_columns

structs = header("attention/params.cuh")


# head dim: block_m, block_n, q_stages, kv_stages
FORWARD_TILES = {
    32: (192, 128, 2, 4),
    64: (192, 128, 2, 3),
    96: (192, 96, 2, 2),
    128: (128, 128, 2, 2),
    192: (128, 112, 1, 2),
    256: (128, 80, 1, 2),
}
# Smaller ones for short sequences, where a large tile wastes much on a mask's diagonal or behind
# the last query.
FORWARD_TILES_LOW = {
    32: (128, 128, 2, 4),
    64: (128, 128, 2, 3),
    96: (128, 128, 2, 2),
    128: (128, 128, 2, 2),
    192: (128, 96, 1, 2),
    256: (128, 64, 1, 2),
}
# How short sequences must be for them (`Features.short`), with a mask, and without one where tiles
# of 128 queries have less padding.
SHORT_MASKED = {32: 1, 64: 2, 96: 1, 128: 3, 192: 2, 256: 3}
SHORT_PLAIN = {32: 3, 64: 3, 96: 3, 128: 3, 192: 3, 256: 4}
# Softcap, ALiBi and dropout need more registers than a third of the file.
FORWARD_TILES_SCORE = FORWARD_TILES_LOW | {192: (128, 112, 1, 2)}
# And a bias more still.
FORWARD_TILES_BIAS = {
    32: (128, 80, 2, 4),
    64: (128, 112, 2, 3),
    96: (128, 112, 2, 2),
    128: (128, 96, 2, 2),
    192: (128, 80, 1, 2),
    256: (128, 64, 1, 2),
}
# ALiBi and dropout beside a bias need even more.
FORWARD_TILES_SEVERAL = {64: (128, 96, 2, 3)}
# But not one that TMA loads, whose tiles have a place in shared memory: the low ones serve. Pair
# biases of small heads are faster on 192 queries, unless these have more padding or a mask.
FORWARD_TILES_TMA_BIAS = FORWARD_TILES_LOW | {32: (192, 96, 2, 3)}
# One key tile for as few keys as the tokens of a text (77).
FORWARD_TILES_FEW_KEYS = {64: (192, 80, 2, 3)}
# The others that `python -m cupyflash tune` tries.
FORWARD_CANDIDATES = {
    32: ((128, 128, 2, 4), (128, 160, 2, 4), (192, 96, 2, 6), (192, 128, 2, 4), (192, 128, 2, 6)),
    64: (
        *((128, 128, 2, 2), (128, 128, 2, 3), (128, 160, 2, 2), (192, 80, 2, 3), (192, 96, 2, 3)),
        *((192, 112, 2, 3), (192, 128, 1, 3), (192, 128, 2, 2), (192, 128, 2, 3)),
    ),
    96: ((128, 112, 2, 2), (128, 128, 2, 2), (128, 160, 2, 2), (192, 80, 2, 2), (192, 96, 2, 2)),
    128: (
        *((128, 80, 2, 3), (128, 96, 2, 2), (128, 96, 2, 3), (128, 112, 2, 2), (128, 128, 1, 2)),
        *((128, 128, 2, 2), (128, 160, 1, 2), (192, 80, 1, 2), (192, 80, 1, 3)),
    ),
    192: ((128, 80, 1, 2), (128, 96, 1, 2), (128, 112, 1, 2)),
    256: ((128, 64, 1, 2), (128, 80, 1, 2)),
}


# (head dim, that of v and out), as in the backward: the tile, and that of short masked sequences.
FORWARD_TILES_NARROW_V = {(192, 128): ((128, 128, 1, 2), (128, 96, 2, 2))}


MAX_SPLITS = 32  # blocks that share a tile: a lane each in the kernel that combines
COMBINE_ROWS = 4  # of a block of that kernel, a warp each


@dataclasses.dataclass(frozen=True)
class FlashFwdSm90(AttentionKernel):
    """Forward: warpgroups of 64 rows each compute a tile, another one loads it.

    Attributes:
        head_dim_v: of v and out: ``head_dim``, or one of `NARROW_V_TILES`.
    """

    source: ClassVar[str] = "attention/flash_fwd_sm90.cu"
    params: ClassVar[type[structs.FlashFwdSm90Params]] = structs.FlashFwdSm90Params
    persistent: ClassVar[bool] = True
    key_mask_header: ClassVar[str] = KEY_MASK_HEADER

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
        """Threads of a block."""
        return (self.block_m // 64 + 1) * WARPGROUP

    @property
    def boxes(self) -> dict[str, int]:
        """Rows of a box of each tensor map."""
        return {"q": 64, "k": self.block_n, "v": self.block_n, "out": 64}

    @property
    def bias_box_rows(self) -> int:
        """Rows of a box of the map of the bias: those of a warpgroup."""
        return 64 if self.bias in BIAS_BY_TMA else 0

    @property
    def combine(self) -> "FlashFwdCombineSm90":
        """The kernel that follows ``split_keys()``."""
        return FlashFwdCombineSm90(self.dtype, self.head_dim_v, COMBINE_ROWS, MAX_SPLITS)

    def split_keys(self) -> "FlashFwdSm90":
        """The same for blocks that share the keys of a tile."""
        return dataclasses.replace(self, split=True)


@dataclasses.dataclass(frozen=True)
class FlashFwdCombineSm90(AttentionKernel):
    """Forward, where blocks have shared the keys of a tile: puts their results together."""

    source: ClassVar[str] = "attention/flash_fwd_combine_sm90.cu"
    params: ClassVar[type[structs.FlashFwdSm90Params]] = structs.FlashFwdSm90Params

    dtype: str
    head_dim: int
    rows: int
    max_splits: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows * 32

    def grid(self, shape: structs.AttentionShape) -> int:
        """Number of blocks."""
        return -(-shape.seqlen_q // self.rows) * shape.heads_q * shape.batch


@dataclasses.dataclass(frozen=True)
class SequenceMapsSm90(AttentionKernel):
    """A tensor map for each packed sequence, before the forward and the backward kernels."""

    source: ClassVar[str] = "attention/sequence_maps_sm90.cu"
    params: ClassVar[type[structs.SequenceMapsParams]] = structs.SequenceMapsParams

    num_maps: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_maps * 32

    def grid(self, shape: structs.AttentionShape) -> int:
        """Number of blocks."""
        return shape.batch


# Columns of v that the kernels take beside wider q and k.
NARROW_V = sorted({columns for _, columns in sm90_backward.NARROW_V_TILES})
SEQUENCE_MAPS = SequenceMapsSm90(num_maps=4)
PACKED = (SEQUENCE_MAPS,)


def supports(
    dtype: str,
    head_dim: int,
    access: Access,
    features: Features,
    capability: Capability,
    *,
    backward: bool,
) -> bool:
    """Whether this backend computes such a problem; the pass does not matter to it."""
    fits = dtype in HALF and head_dim <= max(FORWARD_TILES) and not features.wide_softcap
    return fits and access >= Access.TENSOR_MAP and architecture(capability).wgmma


def forward(
    dtype: str,
    head_dim: int,
    features: Features,
    capability: Capability,
    tile: Tile | None = None,
) -> FlashFwdSm90:
    """The forward kernel, with the built-in tile unless another is given."""
    padded, built_in = _built_in(head_dim, features)
    block_m, block_n, q_stages, kv_stages = tile = tile or built_in
    head_dim_v = features.head_dim_v or padded
    bias = bias_kind(features)
    switches = (features.softcap, features.alibi, bias, features.dropout)
    columns_q, columns_v = shared_columns(padded), shared_columns(head_dim_v)
    smem_bytes = q_stages * block_m * columns_q * 2
    smem_bytes += kv_stages * block_n * (columns_q + columns_v) * 2
    if bias in BIAS_BY_TMA:
        stages = 2 if padded <= 64 else 1
        smem_bytes += stages * block_m * shared_columns(block_n) * 2
    return FlashFwdSm90(dtype, padded, head_dim_v, *tile, *switches, False, smem_bytes)


def _built_in(head_dim: int, features: Features) -> tuple[int, Tile]:
    """The head dim of the forward kernel, and the built-in tile."""
    if keeps_v(head_dim, features):
        padded = sm90_backward.narrow_v_tile(head_dim, features)[0]
        short = features.masked and features.short >= SHORT_MASKED[padded]
        return padded, FORWARD_TILES_NARROW_V[padded, features.head_dim_v][short]
    padded = _padded(head_dim)
    return padded, _forward_tile(padded, features)


def _forward_tile(padded: int, features: Features) -> Tile:
    """The built-in choice for a head dim of `FORWARD_TILES`, with a v of as many columns."""
    bias = bias_kind(features)
    switches = (features.softcap, features.alibi, bias, features.dropout)
    tile = FORWARD_TILES[padded]
    plain = not any(switches) or switches == (False, False, KEY_MASK, False)
    masked = features.masked and features.short >= SHORT_MASKED[padded]
    fits = features.fits_128 and features.short >= SHORT_PLAIN[padded]
    if not plain:
        tile = FORWARD_TILES_SCORE[padded]
    elif masked or fits:
        tile = FORWARD_TILES_LOW[padded]
    if features.few_keys and not any(switches):
        tile = FORWARD_TILES_FEW_KEYS.get(padded, tile)
    if bias in BIAS_BY_TMA:
        low = features.masked or features.fits_128
        tile = (FORWARD_TILES_LOW if low else FORWARD_TILES_TMA_BIAS)[padded]
    elif bias not in (0, KEY_MASK):  # a key mask alone takes few registers
        tile = FORWARD_TILES_BIAS[padded]
        if features.alibi and features.dropout:
            tile = FORWARD_TILES_SEVERAL.get(padded, tile)
    return tile


def backward(
    dtype: str,
    head_dim: int,
    features: Features,
    capability: Capability,
    tile: Tile | None = None,
) -> tuple[KernelConfig, ...]:
    """The backward kernels in launch order, with the built-in tile unless another is given."""
    return sm90_backward.backward(dtype, head_dim, features, tile)


def keeps_v(head_dim: int, features: Features) -> bool:
    """Whether the kernels take v and out with fewer columns than q and k have."""
    return sm90_backward.narrow_v_tile(head_dim, features) is not None


def candidates(
    head_dim: int, features: Features, capability: Capability, *, backward: bool
) -> tuple[Tile, ...]:
    """The tiles that `forward` or `backward` takes, the built-in choice first."""
    if backward:
        return sm90_backward.candidates(head_dim, features)
    padded, built_in = _built_in(head_dim, features)
    if features.head_dim_v:
        return (built_in, *FORWARD_TILES_NARROW_V[padded, features.head_dim_v])
    return (built_in, *FORWARD_CANDIDATES[padded])


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Every configuration that ``forward`` and ``backward`` can pick, each once."""
    if not architecture(capability).wgmma:
        return
    yield from PACKED
    seen = set()
    both = (False, True)
    biases = [(kind, False) for kind in BIASES] + [(1, True), (KEY_MASK + 1, True)]
    values = itertools.product(both, both, both, (0, len(SHORT)), biases, both)
    all_features = [Features(*x, *bias[:1], dropout, *bias[1:]) for *x, bias, dropout in values]
    all_features += [x._replace(fits_128=True) for x in all_features if x.bias_by_tma]
    all_features.append(Features(few_keys=True))
    for problem in itertools.product(HALF, FORWARD_TILES, all_features, [capability]):
        kernels = [forward(*problem), *backward(*problem)]
        kernels = [x for kernel in kernels for x in kernel.launched(capability)]
        yield from (config for config in kernels if config not in seen)
        seen.update(kernels)
    for dtype, (head_dim, head_dim_v) in itertools.product(HALF, sm90_backward.NARROW_V_TILES):
        features = Features(head_dim_v=head_dim_v)
        for problem in (features, features._replace(masked=True, short=len(SHORT))):
            config = forward(dtype, head_dim, problem, capability)
            yield from (config, config.split_keys())
        yield from backward(dtype, head_dim, features, capability)[1].launched(capability)


def _padded(head_dim: int) -> int:
    return next(size for size in FORWARD_TILES if size >= head_dim)
