"""The functions of `Backend` for ``sm90``."""

import dataclasses
import itertools
from collections.abc import Iterator

from ....runtime.config import KernelConfig
from ....runtime.gpu import HALF, Capability, architecture
from ..kernels import each_once
from ..kind import KEY_MASK, SHORT, Access, Features, Kind
from ..masks import MaskOrderKernel, finder_of
from ..sm80.backend import BIASES
from . import boolean_bias
from .backward import backward as backward
from .backward import backward_candidates as backward_candidates
from .backward import backward_kernels, can_take_heads, variants
from .forward import FORWARD_TILES, forward_kernels
from .forward import forward as forward
from .forward import forward_candidates as forward_candidates
from .kernels import MAPS_OF_PAGES, NARROW_V, SEQUENCE_MAPS, narrow_head_dim


def supports(kind: Kind, access: Access, *, backward: bool) -> bool:
    """Whether this backend computes such a problem; the pass does not matter to it."""
    fits = kind.head_dim <= max(FORWARD_TILES) and not kind.features.wide_softcap
    fits = fits and kind.dtype in HALF and architecture(kind.capability).wgmma
    return fits and access >= Access.TENSOR_MAP


def priority(kind: Kind, *, backward: bool) -> int:
    """It comes before all others, except for the shortest sequences."""
    return 3


def pads(kind: Kind) -> bool:
    """Whether a v of fewer columns than q and k is padded: not where there are kernels for it."""
    return narrow_head_dim(kind.head_dim, kind.features) is None


def kernels(kind: Kind, *, backward: bool) -> Iterator[KernelConfig]:
    """Every kernel that a pass of such problems can launch, also where v has fewer columns."""
    if kind.features.paged:
        yield from (MAPS_OF_PAGES, *forward_kernels(kind))
        return
    yield SEQUENCE_MAPS  # for packed sequences
    narrow = [kind.features._replace(head_dim_v=columns) for _, columns in NARROW_V]
    narrow = [x for x in narrow if narrow_head_dim(kind.head_dim, x)]
    for features in (kind.features, *narrow):
        of_width = kind._replace(features=features)
        yield from _backward_kernels(of_width) if backward else forward_kernels(of_width)
    if kind.head_dim <= boolean_bias.MOST_HEAD_DIM and boolean_bias.can_be_text(kind.features):
        features = boolean_bias.features_as_text(kind.features)
        yield from _kernels_with_tiles(kind._replace(features=features), backward)


def _backward_kernels(kind: Kind) -> Iterator[KernelConfig]:
    preprocess, main, *others = backward_kernels(kind)
    yield from (preprocess, *variants(main), *others)
    if can_take_heads(main):
        yield dataclasses.replace(preprocess, clears=False)


def _kernels_with_tiles(kind: Kind, backward: bool) -> Iterator[KernelConfig]:
    """The kernels that skip the empty tiles of a text, and the kernel that finds these tiles."""
    found = backward_kernels(kind)[1:2] if backward else forward_kernels(kind)
    skipping = [x for x in found if x.tiles]
    yield from (finder_of(skipping[0]), *skipping)


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    if not architecture(capability).wgmma:
        return
    both = (False, True)
    biases = [(kind, False) for kind in BIASES] + [(1, True), (KEY_MASK + 1, True)]
    values = itertools.product(both, both, both, (0, len(SHORT)), biases, both)
    features = [Features(*x, *bias[:1], dropout, *bias[1:]) for *x, bias, dropout in values]
    features += [x._replace(fits_128=True) for x in features if x.bias_by_tma]
    features.append(Features(few_keys=True))
    features += [
        Features(*x, short, paged=True)
        for *x, short in itertools.product(both, both, both, (0, len(SHORT)))
    ]
    yield from (MaskOrderKernel(by_keys) for by_keys in both)
    yield from each_once(
        kernels(Kind(*problem, capability), backward=x)
        for *problem, x in itertools.product(HALF, FORWARD_TILES, features, both)
    )
