"""The backward kernels of the backend ``sm80``: their tiles, configurations and pass.

The tiles of head dims 32, 64, 96 and 128 were measured on an H200; the others, and those with a
bias or dropout, are the largest that compile without spills.
"""

import dataclasses
from typing import ClassVar

from ....runtime.config import KernelConfig
from ....runtime.gpu import Capability, Card, architecture
from .. import sharing
from ..kernels import AttentionKernel, FlashBwdCombine, FlashBwdPreprocess, Tile
from ..kind import Features, Kind
from ..passes import Pass, Sharing, Wanted, backward_pass
from ..problem import Problem
from . import capture_gradients, dbias, short
from .forward import Tiles, padded_head_dim

# head dim: block_m, block_n, num_warps, num_stages
BACKWARD_TILES = {
    "large": {
        32: (128, 128, 8, 2),
        64: (64, 128, 8, 2),
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

# For narrow heads without options of the score, a kernel in which each warp owns keys: block_m,
# block_n, num_warps. Two of its blocks fit on a multiprocessor.
BACKWARD_TILES_KEYS = {
    "large": {32: (128, 128, 4), 64: (64, 128, 4), 96: (64, 64, 4)},
    "small": {32: (64, 128, 4), 64: (32, 128, 4)},
}
BACKWARD_TILES_KEYS["sm100"] = BACKWARD_TILES_KEYS["large"]
BACKWARD_TILES_KEYS["sm120"] = BACKWARD_TILES_KEYS["small"]

# The derivative of the softcap, and ALiBi, need registers that the widest tiles do not leave.
BACKWARD_TILES_SCORE = {96: (64, 64, 8, 2), 128: (64, 64, 8, 2)}
BACKWARD_TILES_BIAS = {
    "large": BACKWARD_TILES["large"] | BACKWARD_TILES_SCORE | {32: (64, 128, 8, 2)},
    "small": BACKWARD_TILES["small"],
    "turing": BACKWARD_TILES["turing"],
    "sm100": BACKWARD_TILES["sm100"],
    "sm120": BACKWARD_TILES["sm120"] | {32: (64, 128, 8, 2)},
}
# The others that `python -m cupyflash tune` tries, whatever the head dim.
BACKWARD_CANDIDATES = (
    *((32, 64, 4, 1), (64, 32, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1), (64, 64, 8, 2)),
    *((64, 128, 8, 1), (64, 128, 8, 2), (128, 64, 8, 2), (128, 128, 8, 2)),
)
BACKWARD_CANDIDATES_KEYS = ((32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 128, 4))


@dataclasses.dataclass(frozen=True)
class FlashBwdSm80(AttentionKernel):
    """Backward: a block computes dK and dV of ``block_n`` keys and adds its share to dQ."""

    source: ClassVar[str] = "attention/sm80/flash_bwd_sm80.cu"
    tiles_of: ClassVar[str] = "k"

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


@dataclasses.dataclass(frozen=True)
class FlashBwdKeysSm80(AttentionKernel):
    """Backward for narrow heads without options: as ``FlashBwdSm80``, but a warp owns keys."""

    source: ClassVar[str] = "attention/sm80/flash_bwd_keys_sm80.cu"
    tiles_of: ClassVar[str] = "k"

    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    arch: int
    smem_bytes: int


@dataclasses.dataclass(frozen=True)
class FlashBwdPostprocessSm80(AttentionKernel):
    """Backward, last: dQ from its float32 accumulator; tiles and warps as in the kernel before."""

    source: ClassVar[str] = "attention/sm80/flash_bwd_postprocess_sm80.cu"

    dtype: str
    head_dim: int
    block_m: int
    num_warps: int
    arch: int
    smem_bytes: int


def backward_tiles(features: Features, capability: Capability) -> Tiles:
    """Head dim: (block_m, block_n, num_warps, num_stages), for every head dim of the backward.

    A tile of `BACKWARD_TILES_KEYS` has no num_stages.
    """
    if features.bias or features.dropout or features.text:
        return BACKWARD_TILES_BIAS[architecture(capability).tiles]
    tiles = BACKWARD_TILES[architecture(capability).tiles]
    if not (features.softcap or features.alibi):
        return tiles | BACKWARD_TILES_KEYS.get(architecture(capability).tiles, {})
    return tiles | BACKWARD_TILES_SCORE if architecture(capability).tiles == "large" else tiles


def backward_kernels(kind: Kind, tile: Tile | None = None) -> tuple[KernelConfig, ...]:
    """The backward kernels in launch order, with the built-in tile unless another is given."""
    if short.supports(kind):
        return (short.kernel(kind),)
    dtype, _, features, capability = kind
    padded, arch = padded_head_dim(kind.head_dim), architecture(capability).mma
    block_m, block_n, num_warps, *num_stages = tile = tile or built_in_tile(kind)
    if num_stages:
        smem_bytes = 4 * ((block_n + num_stages[0] * block_m) * padded + block_m * block_n)
        switches = (*features.switches, smem_bytes)
        main = FlashBwdSm80(dtype, padded, *tile, arch, *switches, text=features.text)
    else:
        smem_bytes = 4 * (block_n + block_m) * padded + 2 * block_m * block_n + 8 * block_m
        main = FlashBwdKeysSm80(dtype, padded, *tile, arch, smem_bytes)
    return (
        FlashBwdPreprocess(dtype, accum_dim=padded),
        main,
        FlashBwdPostprocessSm80(dtype, padded, block_m, num_warps, arch, block_m * padded * 2),
        FlashBwdCombine(dtype, padded),
    )


def backward_candidates(kind: Kind) -> dict[Tile, KernelConfig]:
    """The main kernel by the tiles that `tune` may choose from, the built-in one first."""
    if short.supports(kind):
        return {}
    built_in = built_in_tile(kind)
    of_keys = BACKWARD_CANDIDATES_KEYS if built_in in BACKWARD_CANDIDATES_KEYS else ()
    tiles = (built_in, *of_keys, *BACKWARD_CANDIDATES)
    return {tile: backward_kernels(kind, tile)[1] for tile in tiles}


def built_in_tile(kind: Kind) -> Tile:
    """The built-in choice of the backward."""
    return backward_tiles(kind.features, kind.capability)[padded_head_dim(kind.head_dim)]


def backward(
    problem: Problem, kind: Kind, card: Card, wanted: Wanted, tile: Tile | None = None
) -> Pass:
    if wanted.bias is not None and wanted.in_order:  # the one kernel of a pass adds by atomics
        kind = kind._replace(features=kind.features._replace(one_pass=False))
    configs = backward_kernels(kind, tile)
    of_captures = capture_gradients.plan(problem, kind, wanted)
    if len(configs) == 1:
        sections = sharing.heads_per_section(
            configs[0], problem, card, tensors=2, in_turns=wanted.in_order
        )
        shared = Sharing(heads_per_section=sections)
        return backward_pass(problem, wanted, configs, shared, capture_gradients=of_captures)
    preprocess, main, *_ = configs
    shares = sharing.group_shares(main, problem, card, divides_rows=False)
    shared = Sharing(
        shares,
        sharing.heads_per_section(
            main,
            problem,
            card,
            tensors=4,
            shares=shares,
            least=sharing.least_side_by_side(main, problem, card, shares),
            in_turns=wanted.in_order,
        ),
        in_turns=wanted.in_order,
    )
    return backward_pass(
        problem,
        wanted,
        configs if shares > 1 else configs[:-1],  # without the kernel that adds them up
        shared,
        accum_dim=preprocess.accum_dim,
        bias_gradient=dbias.plan(problem, kind, card, wanted),
        capture_gradients=of_captures,
    )
