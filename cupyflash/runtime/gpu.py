"""Facts about GPUs: a row for each compute capability, and what the installed GPUs report.

A new architecture is a row of `ARCHITECTURES`. The row decides which kernels run on it, and with
which tiles.
"""

import functools
from typing import NamedTuple

from ..jit import compiler
from . import driver

Capability = tuple[int, int]  # compute capability: (major, minor)

HALF = ("float16", "bfloat16")


class Architecture(NamedTuple):
    """Facts about the GPUs of one compute capability.

    Attributes:
        shared_memory: KB that a block may use.
        mma_dtypes: the dtypes that mma.sync multiplies, with float32 accumulators.
        copies: how data reaches shared memory: 75 through registers, 80 by cp.async, 90 by bulk
            copies (the template argument ARCH of kernels).
        clusters: whether kernels in clusters of blocks are used on it.
        wgmma: whether it has the instructions of sm_90a, for kernels whose name ends in ``_sm90``.
        fp16x3: whether three products of float16 parts are faster than one of float32 on CUDA
            cores. Not where most GPUs are GeForce cards: float32 accumulators halve the rate of
            their mma.sync (an RTX 4090: 55 TFLOP/s against 83).
        tiles: the entry of the tile tables of mma.sync kernels; ptxas has fewer registers to spare
            on some architectures.
    """

    shared_memory: int
    mma_dtypes: tuple[str, ...]
    copies: int
    clusters: bool
    wgmma: bool
    fp16x3: bool
    tiles: str

    @property
    def mma(self) -> int:
        """The variant of mma.sync that it has: 75 or 80 (the template argument ARCH of kernels)."""
        return min(self.copies, 80)


ARCHITECTURES: dict[Capability, Architecture] = {
    (6, 0): Architecture(48, (), 75, False, False, False, "turing"),
    (7, 0): Architecture(96, (), 75, False, False, False, "turing"),
    (7, 5): Architecture(64, ("float16",), 75, False, False, True, "turing"),
    (8, 0): Architecture(163, HALF, 80, False, False, True, "large"),
    (8, 6): Architecture(99, HALF, 80, False, False, False, "small"),
    (8, 7): Architecture(163, HALF, 80, False, False, True, "large"),
    (8, 9): Architecture(99, HALF, 80, False, False, False, "small"),
    (9, 0): Architecture(227, HALF, 90, True, True, True, "large"),
    (10, 0): Architecture(227, HALF, 90, True, False, True, "sm100"),
    (10, 3): Architecture(227, HALF, 90, True, False, True, "sm100"),
    (11, 0): Architecture(227, HALF, 90, True, False, True, "sm100"),
    (12, 0): Architecture(99, HALF, 90, False, False, False, "sm120"),
}
OLDEST = min(ARCHITECTURES)


@functools.cache
def architecture(capability: Capability) -> Architecture:
    """The facts about a GPU of this compute capability.

    A GPU without a row has the row of the nearest older capability. One of a new major number is
    treated like the newest consumer GPU, whose blocks have the least shared memory.
    """
    older = [known for known in ARCHITECTURES if known <= capability]
    return ARCHITECTURES[max(older, default=OLDEST)]


@functools.cache
def capability_of(device: int) -> Capability:
    """The compute capability of a GPU.

    Raises:
        ImportError: CuPy or NVRTC is missing. Most calls come here first.
    """
    compiler.nvrtc()
    import cupy

    return divmod(int(cupy.cuda.Device(device).compute_capability), 10)


class Card(NamedTuple):
    """The facts about an installed GPU that plans depend on.

    Attributes:
        multiprocessors: that a plan may use.
        l2_bytes: the size of the L2 cache.
    """

    capability: Capability
    multiprocessors: int
    l2_bytes: int


def card_of(device: int) -> Card:
    """The facts about a GPU, with the multiprocessors of the context that a plan is made for."""
    return Card(capability_of(device), multiprocessors(device), l2_bytes(device))


def multiprocessors(device: int) -> int:
    """The number that a plan may use: that of the context it is made for, or of the whole GPU."""
    return driver.multiprocessor_limit() or all_multiprocessors(device)


@functools.cache
def all_multiprocessors(device: int) -> int:
    """The number of multiprocessors of a GPU."""
    return _attribute(device, "MultiProcessorCount")


@functools.cache
def l2_bytes(device: int) -> int:
    """The size of the L2 cache in bytes."""
    return _attribute(device, "L2CacheSize")


def _attribute(device: int, name: str) -> int:
    import cupy

    return cupy.cuda.Device(device).attributes[name]
