"""GroupNorm with an activation: its kernels, and which of them with which tile."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import ClassVar

from ...runtime.config import ITEM_SIZE, KernelConfig, vector_width, weight_dtypes
from ...runtime.gpu import Capability, architecture
from .steps import Kind, three_steps

ACTIVATIONS = ("none", "silu", "mish", "gelu", "gelu_tanh")

# (threads of a group, loads of a thread, threads of a block, blocks of a multiprocessor at a time),
# the smallest groups first; NCHW.
FORWARD_TILES = (
    *((8, 1, 128, 8), (8, 2, 128, 8), (16, 2, 128, 8), (32, 2, 128, 8), (32, 4, 128, 5)),
    *((64, 4, 64, 16), (128, 4, 128, 8), (256, 4, 256, 4), (256, 5, 256, 4), (256, 8, 256, 3)),
    *((256, 10, 256, 4), (256, 20, 256, 2)),
)
BACKWARD_TILES = (
    *((8, 1, 128, 8), (32, 1, 512, 2), (32, 2, 512, 1), (32, 4, 256, 2), (64, 4, 64, 8)),
    *((128, 4, 128, 4), (256, 4, 256, 2), (256, 5, 256, 2), (256, 10, 256, 2)),
)
LARGEST_BACKWARD = (512, 10, 512, 1)  # where a GPU has no clusters
# The first tiles also serve channels of 8 bytes, two of which make a pack. 4096x1024x4 takes 20 us
# with them, and 60 where threads read element by element (H200).
HALVES_TILES = 7
# These serve threads that read element by element.
ELEMENT_TILES = ((32, 8, 128, 6), (128, 8, 128, 4), (512, 8, 512, 1))
# (blocks of a cluster, threads of a block, loads of a thread, blocks of a multiprocessor).
FORWARD_CLUSTERS = (
    *((2, 256, 20, 2), (8, 256, 10, 4), (8, 256, 16, 2)),
    *((8, 256, 20, 2), (8, 512, 20, 1)),
)
# The forward takes one of these if there are fewer groups than multiprocessors: the most blocks
# first.
SPREAD_CLUSTERS = tuple(
    (cluster, 256, *tile) for cluster in (8, 4, 2) for tile in ((5, 4), (10, 4), (20, 2))
)
BACKWARD_CLUSTERS = (*((cluster, 256, 10, 2) for cluster in (2, 4, 8)), (8, 512, 8, 1))


class OneStepConfig(KernelConfig):
    """A kernel in which blocks have a group in registers or shared memory, in NCHW.

    Attributes:
        weight: dtype of weight and bias.
        loads: packs of a thread.
        vector: elements of a pack.
        blocks: of a multiprocessor at a time.
        size: elements of the largest group.
    """

    cluster: int
    loads: int
    vector: int
    blocks: int
    size: int


@dataclasses.dataclass(frozen=True)
class GroupConfig(OneStepConfig):
    """A block has one group of one sample after the other, or of several samples at a time.

    Attributes:
        channels: of a pack: 1, or 2 of 8 bytes each.
        row_threads: threads that have a group of one sample.
        ahead: loads samples ahead. A block of the forward takes one sample after the other only
            then: else the next block starts while this one still writes.
    """

    cluster: ClassVar[int] = 1

    dtype: str
    weight: str
    activation: str
    channels: int
    row_threads: int
    loads: int
    vector: int
    num_threads: int
    blocks: int
    ahead: bool

    @property
    def rows(self) -> int:
        """Samples that a block has at a time."""
        return self.num_threads // self.row_threads

    @property
    def size(self) -> int:
        """Elements of the largest group."""
        return self.row_threads * self.loads * self.vector


class GroupNormFwd(GroupConfig):
    """Forward."""

    source: ClassVar[str] = "group_norm/group_norm_fwd.cu"


class GroupNormBwd(GroupConfig):
    """Backward."""

    source: ClassVar[str] = "group_norm/group_norm_bwd.cu"


@dataclasses.dataclass(frozen=True)
class ClusterConfig(OneStepConfig):
    """The blocks of a cluster share a group, in the backward of one sample after the other."""

    rows: ClassVar[int] = 1
    pack_bytes: ClassVar[int] = 0  # bytes of shared memory for each pack of a thread

    dtype: str
    weight: str
    activation: str
    cluster: int
    num_threads: int
    loads: int
    vector: int
    blocks: int

    @property
    def size(self) -> int:
        """Elements of the largest group."""
        return self.cluster * self.num_threads * self.loads * self.vector

    @property
    def shared_memory(self) -> int:
        """Bytes of a block."""
        return self.pack_bytes * self.loads * self.num_threads


class GroupNormFwdCluster(ClusterConfig):
    """Forward: the blocks have the group in registers."""

    source: ClassVar[str] = "group_norm/group_norm_fwd_cluster.cu"


class GroupNormBwdCluster(ClusterConfig):
    """Backward: shared memory has x and dout, and two sums for each pack."""

    pack_bytes: ClassVar[int] = 2 * 16 + 8
    source: ClassVar[str] = "group_norm/group_norm_bwd_cluster.cu"


def one_step(
    backward: bool,
    kind: Kind,
    size: int,
    aligned: bool,
    halves: bool,
    capability: Capability,
    spread: int = 1,
) -> OneStepConfig | None:
    """The kernel for groups of ``size`` elements side by side, NCHW; None where none fits.

    Args:
        spread: multiprocessors that there are for each group. The forward of a small batch uses
            them: 1x320x64x64 takes 8.1 us in clusters of 4 blocks, 10.2 in a block (H200).
    """
    if aligned and not backward and architecture(capability).clusters:
        clusters = (x for x in SPREAD_CLUSTERS if x[0] <= spread)
        for config in _clusters(GroupNormFwdCluster, kind, clusters):
            if size <= config.size <= 2 * size:
                return config
    configs = _one_step(backward, kind, aligned, halves, capability)
    return next((x for x in configs if size <= x.size), None)


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Everything that GroupNorm can launch."""
    for dtype, aligned, backward in itertools.product(ITEM_SIZE, (False, True), (False, True)):
        for kind in itertools.product((dtype,), weight_dtypes(dtype), ACTIVATIONS):
            yield from _one_step(backward, kind, aligned, False, capability)
            if not aligned:
                yield from _one_step(backward, kind, False, True, capability)
            for nhwc in (False, True):
                yield from three_steps(backward, kind, aligned, nhwc).steps()
            if aligned and not backward and architecture(capability).clusters:
                spread = (x for x in SPREAD_CLUSTERS if x not in FORWARD_CLUSTERS)
                yield from _clusters(GroupNormFwdCluster, kind, spread)


def _one_step(
    backward: bool, kind: Kind, aligned: bool, halves: bool, capability: Capability
) -> Iterator[OneStepConfig]:
    """The smallest groups first."""
    config, tiles = (GroupNormBwd, BACKWARD_TILES) if backward else (GroupNormFwd, FORWARD_TILES)
    clusters = architecture(capability).clusters and aligned
    if halves:
        tiles = tiles[:HALVES_TILES]
    elif not aligned:
        tiles = ELEMENT_TILES
    elif backward and not clusters:
        tiles = (*tiles, LARGEST_BACKWARD)
    vector = vector_width(kind[0]) if aligned or halves else 1
    # The slope of GELU leaves no registers for loads ahead of it on Turing.
    no_registers = backward and kind[2] in ("gelu", "gelu_tanh") and capability < (8, 0)
    for threads, loads, *block in tiles:
        ahead = threads <= 32 and loads <= 4 and not no_registers
        yield config(*kind, 1 + halves, threads, loads, vector, *block, ahead)
    if clusters and backward:
        yield from _clusters(GroupNormBwdCluster, kind, BACKWARD_CLUSTERS)
    elif clusters:
        yield from _clusters(GroupNormFwdCluster, kind, FORWARD_CLUSTERS)


def _clusters(
    config: type[ClusterConfig], kind: Kind, tiles: Iterable[tuple[int, ...]]
) -> Iterator[ClusterConfig]:
    for *tile, blocks in tiles:
        yield config(*kind, *tile, vector_width(kind[0]), blocks)
