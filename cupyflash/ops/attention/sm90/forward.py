"""The forward kernels of the backend ``sm90``: their tiles, configurations and pass."""

import dataclasses
import functools

from ....runtime.config import KernelConfig
from ....runtime.gpu import Card
from .. import sharing
from ..fitting import fitting_tile
from ..kernels import Tile
from ..kind import KEY_MASK, Features, Kind
from ..passes import Pass, forward_pass
from ..problem import Problem
from . import boolean_bias
from .kernels import (
    BIAS_BY_TMA,
    FlashFwdCombineSm90,
    FlashFwdSm90,
    bias_kind,
    narrow_head_dim,
    shared_columns,
)
from .launch import PersistentLaunch, SplitLaunch

# head dim: block_m, block_n, q_stages, kv_stages
FORWARD_TILES = {
    32: (192, 128, 2, 4),
    64: (192, 128, 2, 3),
    96: (192, 96, 2, 2),
    128: (128, 128, 2, 2),
    192: (128, 112, 1, 2),
    256: (128, 80, 1, 2),
}
# These smaller tiles serve short sequences, where a large one wastes much on a mask's diagonal or
# behind the last query.
FORWARD_TILES_LOW = {
    32: (128, 128, 2, 4),
    64: (128, 128, 2, 3),
    96: (128, 128, 2, 2),
    128: (128, 128, 2, 2),
    192: (128, 96, 1, 2),
    256: (128, 64, 1, 2),
}
# Sequences are short enough for them from these values of `Features.short` on: with a mask, and
# without one where tiles of 128 queries have less padding.
SHORT_MASKED = {32: 1, 64: 2, 96: 1, 128: 3, 192: 2, 256: 3}
SHORT_PLAIN = {32: 3, 64: 3, 96: 3, 128: 3, 192: 3, 256: 4}
# Softcap, ALiBi and dropout need more registers than a third of the file, so they take the low
# tiles; softcap or ALiBi alone leaves enough for a wider one, or for more queries and fewer keys.
FORWARD_TILES_ONE = FORWARD_TILES_LOW | {192: (128, 112, 1, 2)}
FORWARD_TILES_ONE_HIGH = {32: (192, 112, 2, 4), 64: (192, 96, 2, 3), 96: (192, 96, 2, 2)}
# A bias needs even more.
FORWARD_TILES_BIAS = {
    32: (128, 80, 2, 4),
    64: (128, 112, 2, 3),
    96: (128, 112, 2, 2),
    128: (128, 96, 2, 2),
    192: (128, 80, 1, 2),
    256: (128, 64, 1, 2),
}
# So does ALiBi beside a bias, and a softcap beside ALiBi or a key mask.
FORWARD_TILES_TWO = FORWARD_TILES_BIAS | {96: (128, 96, 2, 2)}
# ALiBi and dropout beside a bias need even more.
FORWARD_TILES_SEVERAL = {64: (128, 96, 2, 3)}
# A bias that TMA loads lies in shared memory instead of registers, so the low tiles serve it. Pair
# biases of small heads are faster on 192 queries, unless these have more padding or a mask.
FORWARD_TILES_TMA_BIAS = FORWARD_TILES_LOW | {32: (192, 96, 2, 3)}
# A text that is a score, with no mask or option beside it, takes the first of these tiles for which
# it leaves registers enough. Other texts, and other head dims, take the low tiles.
FORWARD_TILES_TEXT = {
    32: ((192, 128, 2, 4), (192, 96, 2, 4)),
    64: ((192, 128, 2, 3), (192, 96, 2, 3)),
    96: ((192, 96, 2, 2),),
}
# The rows of keys of the last tile that is tried for a text, which may need many registers.
TEXT_KEYS = 64
# One tile holds all keys where there are as few as the tokens of a text (77).
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


# The tile by (head dim, head dim of v and out), and that of short masked sequences.
FORWARD_TILES_NARROW_V = {(192, 128): ((128, 128, 1, 2), (128, 96, 2, 2))}

# Up to this head dim, a step of the product adds a term of each column to S: a line of the
# distance, or what a text adds for a key. It reads a row of so many bytes for each column.
MAX_TERMS, TERM_BYTES = 128, 64
FEW_TILES_ROWS = (128, 64)  # queries of the tiles that serve where there are few of them
COMBINE_ROWS = 4  # rows of a block of the kernel that combines, a warp each


def forward_kernel(kind: Kind, tile: Tile | None = None) -> FlashFwdSm90:
    """The forward kernel, with the built-in tile unless another is given."""
    dtype, _, features, _ = kind
    padded, built_in = _built_in(kind)
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
    elif padded <= MAX_TERMS:
        tiles = has_line(features) + kv_stages * has_key_terms(features)
        smem_bytes += tiles * block_n * TERM_BYTES
    sizes = (padded, head_dim_v, *tile)
    others = {"text": features.text, "tiles": features.mask_has_tiles, "paged": features.paged}
    return FlashFwdSm90(dtype, *sizes, *switches, False, smem_bytes, **others)


def has_line(features: Features) -> bool:
    """Whether S may have a term that is a line of the distance far from the diagonal."""
    of_text = features.text and features.text.has_line and not features.bias
    of_alibi = features.alibi and not features.softcap and features.bias in (0, KEY_MASK)
    return of_alibi or bool(of_text)


def has_key_terms(features: Features) -> bool:
    """Whether S may have terms of the keys, a tile of them for each stage of K."""
    text = features.text
    return bool(text and text.has_key_terms and not (features.bias or features.paged))


def split_kernels(main: FlashFwdSm90) -> tuple[FlashFwdSm90, FlashFwdCombineSm90]:
    """The kernel whose blocks share the keys of a tile, and the one that combines their results."""
    combine = FlashFwdCombineSm90(main.dtype, main.head_dim_v, COMBINE_ROWS)
    return dataclasses.replace(main, split=True), combine


def forward(problem: Problem, kind: Kind, card: Card, tile: Tile | None = None) -> Pass:
    """The launch of the forward pass; where tiles are few, blocks may share the keys of each."""
    if tile is None and boolean_bias.is_text(problem):
        problem = boolean_bias.as_text(problem)
        kind = problem.kind(card.capability)
        tile = _built_in(kind)[1]
    if kind.features.text and tile is None:

        def launched(tile: Tile) -> FlashFwdSm90:
            main, splits = sharing.choose([forward_kernel(kind, tile)], problem, card)
            return split_kernels(main)[0] if splits > 1 else main

        tile = fitting_tile(text_tiles(kind), launched, kind.capability)
    mains = [forward_kernel(kind, x) for x in ([tile] if tile else _built_in_tiles(kind))]
    main, splits = sharing.choose(mains, problem, card)
    launch = functools.partial(PersistentLaunch, card=card)
    if splits > 1:
        main, combine = split_kernels(main)
        launch = functools.partial(SplitLaunch, card=card, splits=splits, combine=combine)
    return forward_pass(problem, card, main, launch, even_end=problem.total_q is None)


def forward_kernels(kind: Kind) -> tuple[KernelConfig, ...]:
    """Every kernel that a forward pass can launch."""
    mains = [forward_kernel(kind, tile) for tile in _built_in_tiles(kind)]
    return (*mains, *split_kernels(mains[-1]))


def forward_candidates(kind: Kind) -> dict[Tile, KernelConfig]:
    """The kernel by the tiles that `tune` may choose from, the built-in one first."""
    built_in, *few = _built_in_tiles(kind)
    padded, _ = _built_in(kind)
    others, head_dim_v = FORWARD_CANDIDATES[padded], kind.features.head_dim_v
    if head_dim_v:
        others = FORWARD_TILES_NARROW_V[padded, head_dim_v]
    return {tile: forward_kernel(kind, tile) for tile in (built_in, *others, *few)}


def _built_in_tiles(kind: Kind) -> tuple[Tile, ...]:
    """The built-in choice for many tiles, then the others for few, of fewer queries.

    Options have only the first: beside a bias some of the others spill, and none was measured.
    """
    block_m, *rest = tile = _built_in(kind)[1]
    if not _is_plain(kind.features):
        return (tile,)
    smaller = (rows for rows in FEW_TILES_ROWS if rows < block_m)
    return (tile, *((rows, *rest) for rows in smaller))


def text_tiles(kind: Kind) -> tuple[Tile, ...]:
    """The tiles that a kernel with a text may have: the built-in one, then smaller ones."""
    padded, built_in = _built_in(kind)
    block_m, _, *stages = FORWARD_TILES_BIAS[padded]
    wide = FORWARD_TILES_TEXT.get(padded, ())
    first = (*wide, FORWARD_TILES_LOW[padded]) if built_in in wide else (built_in,)
    tiles = (*first, FORWARD_TILES_BIAS[padded], (block_m, TEXT_KEYS, *stages))
    return tuple(dict.fromkeys(tiles))


def _built_in(kind: Kind) -> tuple[int, Tile]:
    """The head dim of the forward kernel, and the built-in tile."""
    _, head_dim, features, _ = kind
    narrow = narrow_head_dim(head_dim, features)
    if narrow:
        short = features.masked and features.short >= SHORT_MASKED[narrow]
        return narrow, FORWARD_TILES_NARROW_V[narrow, features.head_dim_v][short]
    padded = next(size for size in FORWARD_TILES if size >= head_dim)
    return padded, _forward_tile(padded, features)


def _is_plain(features: Features) -> bool:
    """Whether the scores have no option but perhaps a key mask, which takes few registers."""
    return not features.changes_scores and features.bias in (0, KEY_MASK)


def _forward_tile(padded: int, features: Features) -> Tile:
    """The built-in choice for a head dim of `FORWARD_TILES`, with a v of as many columns."""
    bias = bias_kind(features)
    switches = (features.softcap, features.alibi, bias, features.dropout)
    tile = FORWARD_TILES[padded]
    masked = features.masked and features.short >= SHORT_MASKED[padded]
    fits = features.fits_128 and features.short >= SHORT_PLAIN[padded]
    if not _is_plain(features):
        several = features.dropout or features.text
        several = several or features.softcap + features.alibi + bool(bias) > 1
        tile = (FORWARD_TILES_LOW if several else FORWARD_TILES_ONE)[padded]
        if features.softcap and (features.alibi or bias):
            tile = FORWARD_TILES_TWO[padded]
        if not (several or masked or fits):
            tile = FORWARD_TILES_ONE_HIGH.get(padded, tile)
        if features.writes_scores and not (features.text.mask or any(switches) or masked or fits):
            tile = FORWARD_TILES_TEXT.get(padded, (tile,))[0]
    elif masked or fits:
        tile = FORWARD_TILES_LOW[padded]
    if features.few_keys and not any(switches) and not features.text:
        tile = FORWARD_TILES_FEW_KEYS.get(padded, tile)
    if bias in BIAS_BY_TMA:
        low = features.masked or features.fits_128
        tile = (FORWARD_TILES_LOW if low else FORWARD_TILES_TMA_BIAS)[padded]
    elif bias not in (0, KEY_MASK):  # a key mask alone takes few registers
        tile = (FORWARD_TILES_TWO if features.alibi else FORWARD_TILES_BIAS)[padded]
        if features.alibi and features.dropout:
            tile = FORWARD_TILES_SEVERAL.get(padded, tile)
    return tile
