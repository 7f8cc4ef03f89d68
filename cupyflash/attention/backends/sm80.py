"""Backend ``sm80``: mma.sync tensor cores, float16 and bfloat16 (Turing: float16 only).

Tiles depend on the head dim and on the GPU: on its shared memory (A100, H100 and B200 have twice
that of consumer cards) and, on Turing, on the lack of asynchronous copies. They were measured on an
H200 for head dims 64 and 128, the forward also from 160 on and the backward at 32 and 96; the
others, and those with a bias or dropout, are the largest that compile without spills.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ...runtime.config import KernelConfig
from ...runtime.gpu import Capability, architecture
from ...runtime.structs import header
from ..problem import KEY_MASK, Access, Features
from . import sm80_short
from .config import AttentionKernel, FlashBwdCombine, FlashBwdPreprocess, Tile

structs = header("attention/params.cuh")

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
# Where a multiprocessor has 227 KB, two blocks of these fit.
FORWARD_TILES_227_KB = {192: (64, 80, 4), 256: (64, 64, 4)}
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

# The gradient of a shared bias: block_m, block_n, step_m, num_warps.
DBIAS_TILE = (64, 64, 2, 4)
# For sequences of at most 64 queries and keys (Turing has such tiles anyway).
FORWARD_TILES_SHORT = dict.fromkeys((32, 64, 128), (64, 64, 4))

# With a bias or dropout, whatever else: their addresses, values and random numbers need registers.
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
BACKWARD_TILES_BIAS = {
    "large": BACKWARD_TILES["large"] | BACKWARD_TILES_SCORE | {32: (64, 128, 8, 2)},
    "small": BACKWARD_TILES["small"],
    "turing": BACKWARD_TILES["turing"],
    "sm100": BACKWARD_TILES["sm100"],
    "sm120": BACKWARD_TILES["sm120"] | {32: (64, 128, 8, 2)},
}
# The others that `python -m cupyflash tune` tries, whatever the head dim.
FORWARD_CANDIDATES = (
    *((64, 32, 4), (64, 64, 4), (128, 32, 8), (128, 64, 4), (128, 64, 8)),
    *((128, 96, 4), (128, 96, 8), (128, 128, 4), (128, 128, 8)),
)
BACKWARD_CANDIDATES = (
    *((32, 64, 4, 1), (64, 32, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1), (64, 64, 8, 2)),
    *((64, 128, 8, 1), (64, 128, 8, 2), (128, 64, 8, 2), (128, 128, 8, 2)),
)
BACKWARD_CANDIDATES_KEYS = ((32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 128, 4))


def takes_short_tiles(features: Features) -> bool:
    """Whether the forward has the smallest tiles; a bias apart, options need more registers."""
    plain = not (features.softcap or features.alibi or features.dropout)
    return features.one_tile and plain and features.bias < KEY_MASK


def forward_tiles(features: Features, capability: Capability) -> Tiles:
    """Head dim: (block_m, block_n, num_warps), for every head dim of the forward."""
    if takes_short_tiles(features) and architecture(capability).tiles != "turing":
        return forward_tiles(features._replace(one_tile=False), capability) | FORWARD_TILES_SHORT
    if features.bias or features.dropout:
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


def backward_tiles(features: Features, capability: Capability) -> Tiles:
    """Head dim: (block_m, block_n, num_warps, num_stages), for every head dim of the backward.

    A tile of `BACKWARD_TILES_KEYS` has no num_stages.
    """
    if features.bias or features.dropout:
        return BACKWARD_TILES_BIAS[architecture(capability).tiles]
    tiles = BACKWARD_TILES[architecture(capability).tiles]
    if not (features.softcap or features.alibi):
        return tiles | BACKWARD_TILES_KEYS.get(architecture(capability).tiles, {})
    return tiles | BACKWARD_TILES_SCORE if architecture(capability).tiles == "large" else tiles


BIASES = (0, 1, 2, 3, KEY_MASK, KEY_MASK + 1, KEY_MASK + 2)
FLOATING = (1, 3, KEY_MASK + 1, KEY_MASK + 2)  # of these, the ones that have a gradient
PACKED = ()  # packed sequences need no kernel of their own


@dataclasses.dataclass(frozen=True)
class FlashFwdSm80(AttentionKernel):
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


@dataclasses.dataclass(frozen=True)
class FlashBwdSm80(AttentionKernel):
    """Backward: a block computes dK and dV of ``block_n`` keys and adds its share to dQ."""

    source: ClassVar[str] = "attention/flash_bwd_sm80.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams
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

    source: ClassVar[str] = "attention/flash_bwd_keys_sm80.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams
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

    source: ClassVar[str] = "attention/flash_bwd_postprocess_sm80.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams

    dtype: str
    head_dim: int
    block_m: int
    num_warps: int
    arch: int
    smem_bytes: int


@dataclasses.dataclass(frozen=True)
class FlashBwdDbiasSm80(AttentionKernel):
    """Backward: the gradient of a bias that is broadcast over the batch; a block owns a tile."""

    source: ClassVar[str] = "attention/flash_bwd_dbias_sm80.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams
    header: ClassVar[str] = ""  # it includes the one of key masks itself

    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    step_m: int
    num_warps: int
    num_stages: int
    arch: int
    bias: int
    smem_bytes: int


@dataclasses.dataclass(frozen=True)
class FlashBwdDbiasSum(AttentionKernel):
    """Backward, after it, where blocks divide the sequences: the sum of their shares."""

    source: ClassVar[str] = "attention/flash_bwd_dbias_sum.cu"
    params: ClassVar[type[structs.FlashBwdParams]] = structs.FlashBwdParams

    num_warps: int = 8


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


def is_faster(head_dim: int, features: Features, capability: Capability, *, backward: bool) -> bool:
    """Whether it computes such a problem faster than the backends for newer GPUs do."""
    if backward:
        return sm80_short.supports_backward(head_dim, features, capability)
    return takes_short_tiles(features) and _padded(head_dim) in FORWARD_TILES_SHORT


def forward(
    dtype: str,
    head_dim: int,
    features: Features,
    capability: Capability,
    tile: Tile | None = None,
) -> FlashFwdSm80:
    """The forward kernel, with the built-in tile unless another is given."""
    padded = _padded(head_dim)
    block_m, block_n, _ = tile = tile or forward_tiles(features, capability)[padded]
    smem_bytes = (block_m + 2 * block_n) * padded * 2
    return FlashFwdSm80(
        dtype, padded, *tile, architecture(capability).mma, *features.switches, smem_bytes
    )


def backward(
    dtype: str,
    head_dim: int,
    features: Features,
    capability: Capability,
    tile: Tile | None = None,
) -> tuple[KernelConfig, ...]:
    """The backward kernels in launch order, with the built-in tile unless another is given."""
    if sm80_short.supports_backward(head_dim, features, capability):
        return sm80_short.backward(dtype, head_dim, features, capability)
    padded, arch = _padded(head_dim), architecture(capability).mma
    tile = tile or backward_tiles(features, capability)[padded]
    block_m, block_n, num_warps, *num_stages = tile
    if num_stages:
        smem_bytes = 4 * ((block_n + num_stages[0] * block_m) * padded + block_m * block_n)
        main = FlashBwdSm80(dtype, padded, *tile, arch, *features.switches, smem_bytes)
    else:
        smem_bytes = 4 * (block_n + block_m) * padded + 2 * block_m * block_n + 8 * block_m
        main = FlashBwdKeysSm80(dtype, padded, *tile, arch, smem_bytes)
    return (
        FlashBwdPreprocess(dtype, accum_dim=padded),
        main,
        FlashBwdPostprocessSm80(dtype, padded, block_m, num_warps, arch, block_m * padded * 2),
        FlashBwdCombine(dtype, padded),
    )


def candidates(
    head_dim: int, features: Features, capability: Capability, *, backward: bool
) -> tuple[Tile, ...]:
    """The tiles that `forward` or `backward` takes, the built-in choice first."""
    if not backward:
        return (forward_tiles(features, capability)[_padded(head_dim)], *FORWARD_CANDIDATES)
    if sm80_short.supports_backward(head_dim, features, capability):
        return ()
    tile = backward_tiles(features, capability)[_padded(head_dim)]
    owns_keys = tile in BACKWARD_CANDIDATES_KEYS
    return (tile, *(BACKWARD_CANDIDATES_KEYS if owns_keys else ()), *BACKWARD_CANDIDATES)


def dbias(
    dtype: str, head_dim: int, features: Features, capability: Capability
) -> FlashBwdDbiasSm80 | None:
    """The kernel of the gradient of a bias that all sequences share; None where there is none."""
    arch, padded = architecture(capability), _padded(head_dim)
    plain = not (features.softcap or features.alibi or features.dropout)
    if dtype not in arch.mma_dtypes or padded > 64 or features.bias not in FLOATING or not plain:
        return None
    stage_bytes = 2 * sum(DBIAS_TILE[:2]) * padded * 2
    num_stages = min(2, (arch.shared_memory - 3) * 1024 // stage_bytes)  # 3 KB for the constants
    smem_bytes = num_stages * stage_bytes
    switches = (num_stages, arch.mma, features.bias, smem_bytes)
    return FlashBwdDbiasSm80(dtype, padded, *DBIAS_TILE, *switches)


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Every configuration that ``forward`` and ``backward`` can pick, each once."""
    if architecture(capability).mma_dtypes:
        yield FlashBwdDbiasSum()
    seen = set()
    both = (False, True)
    for dtype, head_dim, softcap, alibi, bias, dropout, one_tile in itertools.product(
        architecture(capability).mma_dtypes, HEAD_DIMS, both, both, BIASES, both, both
    ):
        options = {"bias": bias, "dropout": dropout, "one_tile": one_tile, "one_pass": one_tile}
        features = Features(softcap, alibi, **options)
        problem = (dtype, head_dim, features, capability)
        kernels = [forward(*problem)]
        if supports(dtype, head_dim, Access.VECTOR, features, capability, backward=True):
            kernels += backward(*problem)
        shared = dbias(*problem)
        kernels += [shared] if shared else []
        yield from (config for config in kernels if config not in seen)
        seen.update(kernels)


def _padded(head_dim: int) -> int:
    return next(size for size in HEAD_DIMS if size >= head_dim)
