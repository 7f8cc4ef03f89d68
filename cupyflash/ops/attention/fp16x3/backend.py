"""The functions of `Backend` for ``fp16x3``."""

import itertools
from collections.abc import Iterator

from ....runtime.config import KernelConfig
from ....runtime.gpu import Capability, Card, architecture
from ..kernels import Tile, each_once
from ..kind import KEY_MASK, Access, Features, Kind
from ..passes import Pass, Wanted, forward_pass, unshared_backward_pass
from ..problem import Problem
from ..sm80 import capture_gradients
from .kernels import (
    HEAD_DIMS,
    SplitKernel,
    backward_head_dim,
    backward_kernels,
    forward_kernel,
    widest,
)
from .kernels import backward_candidates as backward_candidates
from .kernels import forward_candidates as forward_candidates
from .launch import SplitInputsLaunch

MAX_HEAD_DIM_OF_OPTIONS = 192  # a softcap, ALiBi, a bias and dropout need registers


def supports(kind: Kind, access: Access, *, backward: bool) -> bool:
    """Whether this backend computes a pass of such a problem; the access does not matter."""
    dtype, head_dim, features, capability = kind
    most = widest(capability, backward=backward)
    if backward and head_dim <= most < backward_head_dim(kind):
        return False
    if any(features.switches) or features.text:
        most = min(most, MAX_HEAD_DIM_OF_OPTIONS)
    return (
        dtype == "float32"
        and bool(architecture(capability).mma_dtypes)
        and head_dim <= most
        and not (features.wide_softcap or features.paged)
        and features.bias <= KEY_MASK  # a key mask beside a bias is left to CUDA cores
    )


def priority(kind: Kind, *, backward: bool) -> int:
    """It comes before the kernels for CUDA cores where it is faster; else it must be forced."""
    arch = architecture(kind.capability)
    faster = arch.fp16x3 or (kind.features.tf32 and arch.mma >= 80)
    return 1 if faster and not kind.features.tiny else -1


def pads(kind: Kind) -> bool:
    """The kernels have one head dim for q, k and v."""
    return True


def forward(problem: Problem, kind: Kind, card: Card, tile: Tile | None = None) -> Pass:
    return forward_pass(problem, card, forward_kernel(kind, tile), SplitInputsLaunch)


def backward(
    problem: Problem, kind: Kind, card: Card, wanted: Wanted, tile: Tile | None = None
) -> Pass:
    configs = backward_kernels(kind, tile)
    of_captures = capture_gradients.plan(problem, kind.with_bool_mask, wanted)
    return unshared_backward_pass(
        problem, card, wanted, configs, SplitInputsLaunch, capture_gradients=of_captures
    )


def kernels(kind: Kind, *, backward: bool) -> Iterator[KernelConfig]:
    for config in _own_kernels(kind, backward=backward):
        yield config
        if isinstance(config, SplitKernel):
            yield from config.fallback(kind.capability)


def _own_kernels(kind: Kind, *, backward: bool) -> Iterator[KernelConfig]:
    """The kernels of this folder that a pass of such problems can launch."""
    for config in backward_kernels(kind) if backward else (forward_kernel(kind),):
        yield config
        if isinstance(config, SplitKernel):
            yield from (*config.before, *config.after)


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Every kernel of its own that this backend can launch on such a GPU, each once."""
    kinds, both = [], (False, True)
    for head_dim, softcap, alibi, bias, dropout, tf32 in itertools.product(
        HEAD_DIMS, both, both, range(3), both, both
    ):
        features = Features(softcap, alibi, bias=bias, dropout=dropout, tf32=tf32)
        kinds.append(Kind("float32", head_dim, features, capability))
    yield from each_once(
        _own_kernels(kind, backward=x)
        for kind, x in itertools.product(kinds, both)
        if supports(kind, Access.ELEMENT, backward=x)
    )
