"""The backward of the backend ``sm90``: its tiles, its two main kernels by the width of the heads,
and how a pass is launched.

`backward` decides everything about a pass: the main kernel and its tile, whether blocks take whole
heads (`takes_heads`), or walk up where they add in turns (`walks_up`), and how many share the work
of a key head.
"""

import dataclasses
import functools

from ....runtime.config import ITEM_SIZE, KernelConfig
from ....runtime.gpu import Card
from .. import sharing
from ..fitting import fitting_tile
from ..kernels import FlashBwdCombine, FlashBwdPreprocess, Tile
from ..kind import KEY_MASK, Features, Kind
from ..passes import Pass, Sharing, Wanted, backward_pass, padded_rows
from ..problem import Problem
from ..sm80 import capture_gradients, dbias
from . import boolean_bias
from .kernels import (
    BIAS_BY_TMA,
    STORED_GRADIENT,
    FlashBwdPostprocessSm90,
    FlashBwdSm90,
    FlashBwdWideSm90,
    MainKernel,
    bias_kind,
    narrow_head_dim,
    shared_columns,
)
from .launch import PersistentLaunch

NUM_STAGES = 2  # buffers of Q and dO

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
# (head dim, head dim of v and out): block_m, block_n, groups
NARROW_V_TILES = {(192, 128): (64, 96, 2)}
# The others that `python -m cupyflash tune` tries.
BACKWARD_CANDIDATES = {128: ((64, 64, 2),), 256: ((64, 64, 2),)}
# Where a text leaves the built-in tile too few registers.
TEXT_CANDIDATES = BACKWARD_CANDIDATES | {32: ((64, 128),), 64: ((64, 128),)}
# Taking whole heads saves each query the time of SAVED_KEYS keys. It costs the part of the launch
# in which multiprocessors wait for the last heads, and a part LONELY of all keys, because no other
# block reads the same q and dout at the same time. Blocks take heads if the cost is less.
SAVED_KEYS, LONELY = 64, 0.05
# The part of the L2 cache that q, dout and a dq in float32 of these heads may take, and the part of
# that which they need under a causal mask, where they are read half as often.
HEADS_L2_FRACTION, CAUSAL_L2 = 0.7, 0.6
# Blocks walk up if each multiprocessor has more tiles than this number divided by the head dim; the
# second one is for head dims above 192.
UP_COLUMNS, UP_COLUMNS_WIDE = 400, 2048


def backward_kernels(kind: Kind, tile: Tile | None = None) -> tuple[KernelConfig, ...]:
    """The backward kernels in launch order, with the built-in tile unless another is given."""
    dtype, head_dim, features, _ = kind
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
        dataclasses.replace(main, text=features.text, tiles=features.mask_has_tiles),
        FlashBwdPostprocessSm90(dtype, padded),
        FlashBwdCombine(dtype, padded),
    )


def variants(main: MainKernel) -> tuple[MainKernel, ...]:
    """The kernel, and those that are launched in its place."""
    found = [main, storing_dbias(main), dataclasses.replace(main, walks_up=True)]
    found += [dataclasses.replace(main, whole_heads=True)] if can_take_heads(main) else []
    return tuple(dict.fromkeys(found))


def storing_dbias(main: MainKernel) -> MainKernel:
    """The kernel that stores the gradient of a bias, which is dS; ``main`` if it can only add."""
    slopes = main.softcap or main.text  # then dS is not the gradient of the bias
    if isinstance(main, FlashBwdWideSm90) or main.bias != BIAS_BY_TMA[0] or slopes:
        return main
    return dataclasses.replace(main, bias=STORED_GRADIENT)


def can_take_heads(main: MainKernel) -> bool:
    """Whether the kernel has the variant `BwdHeadTile`: without options."""
    options = main.softcap or main.alibi or main.bias or main.dropout or main.text
    return isinstance(main, FlashBwdSm90) and not options


def backward_candidates(kind: Kind) -> dict[Tile, KernelConfig]:
    """The main kernel by the tiles that `tune` may choose from, the built-in one first."""
    padded, built_in = _built_in(kind.head_dim, kind.features)
    others = TEXT_CANDIDATES if kind.features.text else BACKWARD_CANDIDATES
    others = () if kind.features.head_dim_v else others.get(padded, ())
    return {tile: backward_kernels(kind, tile)[1] for tile in (built_in, *others)}


def backward(
    problem: Problem, kind: Kind, card: Card, wanted: Wanted, tile: Tile | None = None
) -> Pass:
    # Blocks that add in turns skip no tiles of a text.
    if tile is None and not wanted.in_order and boolean_bias.is_text(problem):
        problem = boolean_bias.as_text(problem)
        kind = problem.kind(card.capability)
        tile = _built_in(kind.head_dim, kind.features)[1]
    if kind.features.text and tile is None:
        mains = backward_candidates(kind)
        tile = fitting_tile(mains, mains.__getitem__, kind.capability)
    preprocess, main, postprocess, combine = backward_kernels(kind, tile)
    if wanted.bias is not None and problem.bias_gradient_is_ds:
        main = storing_dbias(main)
    if wanted.in_order:  # whose turn it is follows from the tiles of every row
        main = dataclasses.replace(main, tiles=False)
    shares = group_shares(main, problem, card, wanted.in_order)
    accum_rows, in_turns = None, wanted.in_order
    if takes_heads(main, problem, card, shares):  # each block adds up dq alone, in order of keys
        in_turns = False
        main = dataclasses.replace(main, whole_heads=True)
        preprocess = dataclasses.replace(preprocess, clears=False)
        accum_rows = _rows_of_blocks(main, problem, card, shares)
    elif in_turns and walks_up(main, problem, card, shares):
        main = dataclasses.replace(main, walks_up=True)
    shared = Sharing(
        shares, _heads_per_section(main, problem, card, shares, in_turns), in_turns, accum_rows
    )
    configs = [preprocess, main]
    configs += [] if main.whole_heads else [postprocess]
    configs += [combine] if shares > 1 else []
    return backward_pass(
        problem,
        wanted,
        configs,
        shared,
        accum_dim=preprocess.accum_dim,
        launch=functools.partial(PersistentLaunch, card=card),
        bias_gradient=dbias.plan(problem, kind, card, wanted),
        stores_dbias=main.stores_dbias,
        capture_gradients=capture_gradients.plan(problem, kind, wanted),
    )


def group_shares(main: MainKernel, problem: Problem, card: Card, in_turns: bool) -> int:
    """The number of blocks for the work of a key head: `sharing.group_shares`, as the kernels can.

    Blocks that take turns must find each query tile in the same share of all key tiles, which is
    not so under a mask where they divide the rows of a head.
    """
    divides_rows = not (in_turns and problem.features.masked)
    return sharing.group_shares(main, problem, card, divides_rows=divides_rows)


def takes_heads(main: MainKernel, problem: Problem, card: Card, shares: int) -> bool:
    """Whether each block of the backward pass should take all keys of a head.

    Then dq_accum is neither cleared before the main kernel nor converted after it. But the launch
    ends with whole heads, and the rows of as many of them as there are multiprocessors should fit
    the L2 cache, unless there is one tile of keys. Every query must see the first key.
    """
    shape, at_once = problem.shape, card.multiprocessors
    diagonal = 0 if shape.top_left else shape.seqlen_k - shape.seqlen_q
    sees_first = -shape.window_right <= diagonal <= shape.window_left - shape.seqlen_q + 1
    group = shape.heads_q // shape.heads_kv
    if not can_take_heads(main) or problem.has_own_lengths or not sees_first:
        return False
    if shape.seqlen_k <= main.tile_rows:
        return True
    if shares > group and problem.features.masked:
        return False  # blocks divide the rows of a head, otherwise in each key tile
    heads = shape.heads_kv * shares * shape.batch
    rows = -(-group // shares) * shape.seqlen_q
    row_bytes = shape.head_dim * (ITEM_SIZE[problem.dtype] * 2 + 4)
    keys, needed = shape.seqlen_k, rows * row_bytes * at_once
    if problem.is_causal:
        keys, needed = keys / 2, needed * CAUSAL_L2
    idle = -heads % at_once / heads
    fits = needed < HEADS_L2_FRACTION * card.l2_bytes
    return fits and (idle + LONELY) * keys < SAVED_KEYS


def walks_up(main: MainKernel, problem: Problem, card: Card, shares: int) -> bool:
    """Whether blocks that add in turns should walk from the first query to the last.

    Under a causal mask they then wait less for each other, but each launch ends with its longest
    tiles, which a launch of few tiles cannot afford. With several query heads in each block, they
    would be at different ones, which do not fit the L2 cache.
    """
    shape = problem.shape
    if main.stores_dbias or not problem.is_causal:
        return False
    few = UP_COLUMNS if main.head_dim <= 192 else UP_COLUMNS_WIDE
    columns = sharing.num_tiles(main, problem, shares) * main.head_dim
    many = columns > few * card.multiprocessors
    return many and shape.heads_q <= shape.heads_kv * shares


def _heads_per_section(
    main: MainKernel, problem: Problem, card: Card, shares: int, in_turns: bool
) -> int:
    if main.whole_heads:
        return 1
    return sharing.heads_per_section(
        main,
        problem,
        card,
        tensors=4,  # q, dout, and dq_accum in float32
        shares=shares,
        least=sharing.least_side_by_side(main, problem, card, shares),
        even_end=problem.total_q is None and not in_turns,
        in_turns=in_turns,
        walks_up=main.walks_up,
    )


def _rows_of_blocks(main: MainKernel, problem: Problem, card: Card, shares: int) -> int:
    """Rows of dq_accum where a block takes whole heads: one place for each block."""
    shape = problem.shape
    if shape.seqlen_k <= main.tile_rows:
        return 0
    blocks = min(shape.heads_kv * shares * shape.batch, card.multiprocessors)
    heads = -(-shape.heads_q // (shape.heads_kv * shares))  # heads of a block
    return blocks * heads * (padded_rows(problem) // shape.batch)


def _built_in(head_dim: int, features: Features) -> tuple[int, Tile]:
    """The head dim of the kernel, and the built-in tile: of wide heads with its ``groups``."""
    softcap, alibi, bias, dropout = features.switches
    softcap = softcap or features.bends_scores  # its slope takes the same registers
    narrow = narrow_head_dim(head_dim, features)
    if narrow:
        return narrow, NARROW_V_TILES[narrow, features.head_dim_v]
    alibi = alibi or (features.writes_scores and not softcap)
    tiles = TILES_ONE if softcap or dropout or (alibi and bias) else TILES
    if tiles is TILES and bias > KEY_MASK:
        tiles = TILES_KEY_MASK
    if softcap + dropout + bool(bias) > 1 or (softcap and alibi):
        tiles = TILES_SEVERAL
    if softcap + alibi + dropout + bool(bias) > 2:
        tiles = TILES_MANY
    crowded = softcap or bias or dropout or features.writes_scores
    wide_tiles = WIDE_TILES_SCORE if crowded else WIDE_TILES
    tiles = wide_tiles | tiles
    padded = min(size for size in tiles if size >= head_dim)
    return padded, tiles[padded]


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
