"""The functions of `Backend` for ``simt``."""

import itertools
from collections.abc import Iterator

from ....runtime.config import ITEM_SIZE, KernelConfig
from ....runtime.gpu import Capability, Card
from ..capture_gradients import RoundSums
from ..kernels import FlashBwdSinks, Tile, each_once
from ..kind import KEY_MASK, Access, Features, Kind
from ..masks import MaskRecord
from ..passes import Pass, Wanted, forward_pass, unshared_backward_pass
from ..problem import Problem
from ..sm80 import capture_gradients
from .kernels import HEAD_DIMS, backward_kernels, forward_kernel

MIN_CAPABILITY = (6, 0)


def supports(kind: Kind, access: Access, *, backward: bool) -> bool:
    """Whether this backend computes such a problem; access and pass do not matter."""
    fits = kind.dtype in ITEM_SIZE and kind.head_dim <= HEAD_DIMS[-1] and not kind.features.paged
    return fits and kind.capability >= MIN_CAPABILITY


def priority(kind: Kind, *, backward: bool) -> int:
    """It comes after all others."""
    return 0


def pads(kind: Kind) -> bool:
    """The kernels have one head dim for q, k and v."""
    return True


def forward(problem: Problem, kind: Kind, card: Card, tile: Tile | None = None) -> Pass:
    return forward_pass(problem, card, forward_kernel(kind))


def backward(
    problem: Problem, kind: Kind, card: Card, wanted: Wanted, tile: Tile | None = None
) -> Pass:
    of_captures = capture_gradients.plan(problem, kind.with_bool_mask, wanted)
    return unshared_backward_pass(
        problem, card, wanted, backward_kernels(kind), capture_gradients=of_captures
    )


def forward_candidates(kind: Kind) -> dict[Tile, KernelConfig]:
    """None: the kernels divide their threads for one tile each."""
    return {}


def backward_candidates(kind: Kind) -> dict[Tile, KernelConfig]:
    """None, as in the forward."""
    return {}


def kernels(kind: Kind, *, backward: bool) -> Iterator[KernelConfig]:
    yield from backward_kernels(kind) if backward else (forward_kernel(kind),)


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    if capability < MIN_CAPABILITY:
        return
    kinds, both = [], (False, True)
    for dtype in ITEM_SIZE:
        biases = [0, 1, 2, KEY_MASK + 1]
        if dtype != "float32":  # there it is the dtype of q
            biases += [3, KEY_MASK + 2]
        for head_dim, softcap, alibi, bias, dropout in itertools.product(
            HEAD_DIMS, both, both, biases, both
        ):
            features = Features(softcap, alibi, bias=bias, dropout=dropout)
            kinds.append(Kind(dtype, head_dim, features, capability))
    yield from (MaskRecord(), FlashBwdSinks(), RoundSums())
    yield from each_once(kernels(x, backward=y) for x, y in itertools.product(kinds, both))
