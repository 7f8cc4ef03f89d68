"""The functions of `Backend` for ``sm80``."""

import itertools
from collections.abc import Iterator

from ....runtime.config import KernelConfig
from ....runtime.gpu import Capability, Card, architecture
from .. import passes
from ..kernels import Tile, each_once
from ..kind import KEY_MASK, Access, Features, Kind
from ..passes import Pass
from ..problem import Problem
from . import dbias, short
from .backward import backward as backward
from .backward import backward_candidates as backward_candidates
from .backward import backward_kernels, backward_tiles
from .forward import (
    FORWARD_TILES_SHORT,
    HEAD_DIMS,
    forward_kernel,
    forward_tiles,
    padded_head_dim,
    takes_short_tiles,
)
from .forward import forward_candidates as forward_candidates

BIASES = (0, 1, 2, 3, KEY_MASK, KEY_MASK + 1, KEY_MASK + 2)


def supports(kind: Kind, access: Access, *, backward: bool) -> bool:
    """Whether this backend computes a pass of such a problem; it copies 16 bytes at a time."""
    tiles = (backward_tiles if backward else forward_tiles)(kind.features, kind.capability)
    fits = (
        kind.dtype in architecture(kind.capability).mma_dtypes
        and kind.head_dim <= max(tiles)
        and not (kind.features.wide_softcap or kind.features.paged)
    )
    return fits and access >= Access.VECTOR


def priority(kind: Kind, *, backward: bool) -> int:
    """It comes before the backends of newer GPUs where it is faster: for short sequences."""
    if backward:
        is_faster = short.supports(kind)
    else:
        is_faster = takes_short_tiles(kind.features)
        is_faster = is_faster and padded_head_dim(kind.head_dim) in FORWARD_TILES_SHORT
    return 4 if is_faster else 2


def pads(kind: Kind) -> bool:
    """The kernels have one head dim for q, k and v."""
    return True


def forward(problem: Problem, kind: Kind, card: Card, tile: Tile | None = None) -> Pass:
    return passes.forward_pass(problem, card, forward_kernel(kind, tile))


def kernels(kind: Kind, *, backward: bool) -> Iterator[KernelConfig]:
    if not backward:
        yield forward_kernel(kind)
        return
    yield from backward_kernels(kind)
    shared = dbias.kernel(kind)
    if shared is not None:
        yield from (shared, dbias.FlashBwdDbiasSum())


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    kinds, both = [], (False, True)
    for dtype, head_dim, softcap, alibi, bias, dropout, one_tile in itertools.product(
        architecture(capability).mma_dtypes, HEAD_DIMS, both, both, BIASES, both, both
    ):
        options = {"bias": bias, "dropout": dropout, "one_tile": one_tile, "one_pass": one_tile}
        kinds.append(Kind(dtype, head_dim, Features(softcap, alibi, **options), capability))
    yield from each_once(
        kernels(kind, backward=x)
        for kind, x in itertools.product(kinds, both)
        if supports(kind, Access.VECTOR, backward=x)
    )
