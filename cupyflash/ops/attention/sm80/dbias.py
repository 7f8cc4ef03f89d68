"""The gradient of a bias that all sequences share, in registers and in a fixed order.

Its kernels follow all others of a backward pass on tensor cores. Without them the main kernel of
the pass adds to the gradient by atomics, or stores a gradient of which each element belongs to one
score.
"""

import ctypes
import dataclasses
import math
from typing import ClassVar

from ....runtime.gpu import Card, architecture
from ....runtime.launch import Launch
from ..kernels import AttentionKernel
from ..kind import KEY_MASK, Kind
from ..passes import BiasGradient, Wanted
from ..problem import Problem
from .forward import padded_head_dim

DBIAS_TILE = (64, 64, 2, 4)  # block_m, block_n, step_m, num_warps
FLOATING = (1, 3, KEY_MASK + 1, KEY_MASK + 2)  # the kinds of bias that have a gradient
# A multiprocessor runs BLOCKS blocks at the same time. A block should have LEAST_PAIRS pairs of a
# sequence and a head, and there should be no more rounds of blocks than MOST_ROUNDS, because each
# share leaves sums in memory.
BLOCKS, LEAST_PAIRS, MOST_ROUNDS = 2, 4, 4


@dataclasses.dataclass(frozen=True)
class FlashBwdDbiasSm80(AttentionKernel):
    """Backward: the gradient of a bias that is broadcast over the batch; a block owns a tile."""

    source: ClassVar[str] = "attention/sm80/flash_bwd_dbias_sm80.cu"

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

    source: ClassVar[str] = "attention/sm80/flash_bwd_dbias_sum.cu"

    num_warps: int = 8


def kernel(kind: Kind) -> FlashBwdDbiasSm80 | None:
    """The kernel of the gradient of a bias that all sequences share; None where there is none."""
    dtype, head_dim, features, capability = kind
    arch, padded = architecture(capability), padded_head_dim(head_dim)
    plain = not features.changes_scores
    if dtype not in arch.mma_dtypes or padded > 64 or features.bias not in FLOATING or not plain:
        return None
    stage_bytes = 2 * sum(DBIAS_TILE[:2]) * padded * 2
    num_stages = min(2, (arch.shared_memory - 3) * 1024 // stage_bytes)  # 3 KB for the constants
    smem_bytes = num_stages * stage_bytes
    switches = (num_stages, arch.mma, features.bias, smem_bytes)
    return FlashBwdDbiasSm80(dtype, padded, *DBIAS_TILE, *switches)


def plan(problem: Problem, kind: Kind, card: Card, wanted: Wanted) -> BiasGradient | None:
    """The kernels that sum the gradient of the bias in order; None leaves it to the main kernel."""
    if wanted.bias is None or not problem.bias_is_broadcast or not problem.shape.seqlen_k:
        return None  # the main kernel knows each element
    config = kernel(kind) if problem.bias_gradient_fits_registers else None
    if config is None:
        return None
    _, heads, queries, keys = problem.extras.bias.shape
    tiles = -(-queries // config.block_m) * -(-keys // config.block_n) * heads
    pairs = problem.shape.batch * problem.shape.heads_q // heads
    shares = shares_of_tiles(tiles, BLOCKS * card.multiprocessors, pairs // LEAST_PAIRS)
    size = math.prod(problem.extras.bias.shape)

    def launches(params: ctypes.Structure) -> tuple[Launch, ...]:
        params = type(params).from_buffer_copy(params)
        params.shape.group_shares = shares
        main = Launch(config, problem.device, tiles * shares, params)
        if shares == 1:
            return (main,)
        blocks = -(-size // FlashBwdDbiasSum().threads)
        return (main, Launch(FlashBwdDbiasSum(), problem.device, blocks, params))

    return BiasGradient(shares * size if shares > 1 else 0, launches)


def shares_of_tiles(tiles: int, at_once: int, most: int) -> int:
    """The number of blocks that divide the sequences of a tile, at most ``most``.

    As few as keep 9 of 10 places for blocks (``at_once``) busy until the last block ends, or else
    those that keep the most of them busy.
    """

    def busy(shares: int) -> float:
        blocks = tiles * shares
        return blocks / (-(-blocks // at_once) * at_once)

    possible = range(1, max(1, min(most, MOST_ROUNDS * at_once // tiles)) + 1)
    return next((shares for shares in possible if busy(shares) >= 0.9), max(possible, key=busy))
