"""LayerNorm and RMSNorm: who holds how much of a row."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ..kernel_config import ITEM_SIZE, Capability, KernelConfig, weight_dtypes
from .params import NormBwdParams, NormFwdParams, SumPartialsParams

MIN_BLOCK_THREADS = 128  # as in row_tile.cuh
# (threads of a row, loads of a thread, blocks of a multiprocessor at a time), the shortest rows
# first. Loads are of 16 bytes.
FORWARD_TILES = (
    *((8, 1, 8), (32, 1, 8), (32, 2, 8), (32, 3, 7), (32, 4, 6), (64, 3, 12), (64, 4, 12)),
    *((128, 3, 7), (128, 4, 6), (256, 3, 3), (256, 4, 3), (512, 4, 1)),
)
# (threads of a row, loads of a thread, threads of a block), a block on each multiprocessor.
BACKWARD_TILES = (
    *((8, 2, 512), (32, 2, 512), (32, 3, 512), (64, 2, 512), (64, 3, 384), (128, 2, 512)),
    *((128, 3, 384), (512, 1, 512), (512, 2, 512)),
)
CLUSTERS = 2, 4, 8  # blocks that share a longer row, each with the last of these tiles
# Of the multiprocessors, as no cluster lies in two GPCs: an H200 with its 132 runs 15 clusters of 8
# at once, and 16 take two turns.
IN_CLUSTERS = 7 / 8
MAX_STAGES = 4  # rows of a thread on their way
STATIC_MEMORY = 3 << 10  # __shared__ variables of a block, at most
# Longer rows pass through in pieces: (threads, loads).
LONG_FORWARD_TILE = (512, 4)
LONG_BACKWARD_TILE = (1024, 1)
ELEMENT_LOADS = 8  # where a thread reads element by element
ELEMENT_THREADS = 512  # of a multiprocessor then
FEW_SHARES, FEW_WARPS = 32, 4  # sum_partials, where a block has little to add up

# Shared memory of a block, by compute capability; 99 KB where nothing is said.
SHARED_MEMORY = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}


def vector_width(dtype: str) -> int:
    """Elements of 16 bytes."""
    return 16 // ITEM_SIZE[dtype]


@dataclasses.dataclass(frozen=True)
class RowConfig(KernelConfig):
    """A kernel in which ``row_threads`` threads have a row.

    Attributes:
        weight: dtype of weight and bias.
        rms: RMSNorm, not LayerNorm.
        loads: of a thread, ``vector`` elements each.
        blocks: of a multiprocessor at a time.
    """

    dtype: str
    weight: str
    rms: bool
    row_threads: int
    loads: int
    vector: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block: one row, or several that each have a warp or less."""
        return self.row_threads if self.row_threads > 32 else MIN_BLOCK_THREADS

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.threads // self.row_threads

    @property
    def columns(self) -> int:
        """The longest row that is in registers as a whole."""
        return self.row_threads * self.loads * self.vector


class NormFwd(RowConfig):
    """Forward."""

    source: ClassVar[str] = "norm/norm_fwd.cu"
    params: ClassVar[type[NormFwdParams]] = NormFwdParams


@dataclasses.dataclass(frozen=True)
class NormBwd(KernelConfig):
    """Backward of rows that fit into the registers of a block.

    Attributes:
        stages: of the ring in shared memory, one row each.
    """

    source: ClassVar[str] = "norm/norm_bwd.cu"
    params: ClassVar[type[NormBwdParams]] = NormBwdParams
    cooperative: ClassVar[bool] = True

    dtype: str
    weight: str
    rms: bool
    row_threads: int
    loads: int
    vector: int
    num_threads: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_threads

    @property
    def rows(self) -> int:
        """Rows of a block at a time."""
        return self.num_threads // self.row_threads

    @property
    def columns(self) -> int:
        """The longest row."""
        return self.row_threads * self.loads * self.vector

    @property
    def shared_memory(self) -> int:
        """Of the ring: x, dout and dresidual."""
        return self.stages * stage_bytes(self.num_threads, self.loads, self.vector)


@dataclasses.dataclass(frozen=True)
class NormBwdCluster(KernelConfig):
    """The same of longer rows, which ``cluster`` blocks share."""

    source: ClassVar[str] = "norm/norm_bwd_cluster.cu"
    params: ClassVar[type[NormBwdParams]] = NormBwdParams

    dtype: str
    weight: str
    rms: bool
    cluster: int
    num_threads: int
    loads: int
    vector: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_threads

    @property
    def columns(self) -> int:
        """The longest row."""
        return self.cluster * self.num_threads * self.loads * self.vector

    @property
    def shared_memory(self) -> int:
        """Of the ring: x, dout and dresidual."""
        return self.stages * stage_bytes(self.num_threads, self.loads, self.vector)


@dataclasses.dataclass(frozen=True)
class LongConfig(KernelConfig):
    """A kernel whose block has a row of any length, of which it reads ``loads`` at a time."""

    dtype: str
    weight: str
    rms: bool
    num_threads: int
    loads: int
    vector: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.num_threads


class NormFwdLong(LongConfig):
    """Forward of longer rows."""

    source: ClassVar[str] = "norm/norm_fwd_long.cu"
    params: ClassVar[type[NormFwdParams]] = NormFwdParams


class NormBwdLong(LongConfig):
    """Gradient of the input for longer rows."""

    source: ClassVar[str] = "norm/norm_bwd_long.cu"
    params: ClassVar[type[NormBwdParams]] = NormBwdParams


@dataclasses.dataclass(frozen=True)
class NormBwdWeight(KernelConfig):
    """Shares of the gradient of weight and bias for longer rows."""

    source: ClassVar[str] = "norm/norm_bwd_weight.cu"
    params: ClassVar[type[NormBwdParams]] = NormBwdParams

    dtype: str
    rms: bool
    vector: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return MIN_BLOCK_THREADS

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.threads * self.vector


@dataclasses.dataclass(frozen=True)
class SumPartials(KernelConfig):
    """Adds shares of the gradient of weight and bias up: ``warps`` to a block of 32 columns."""

    source: ClassVar[str] = "norm/sum_partials.cu"
    params: ClassVar[type[SumPartialsParams]] = SumPartialsParams

    weight: str
    warps: int = 32

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps


def forward(
    dtype: str, weight: str, rms: bool, columns: int, aligned: bool
) -> NormFwd | NormFwdLong:
    """The kernel for rows of ``columns``, read 16 bytes at a time where that is possible."""
    tiles = (NormFwd(dtype, weight, rms, *tile) for tile in _tiles(FORWARD_TILES, dtype, aligned))
    long = NormFwdLong(dtype, weight, rms, *_long_tile(LONG_FORWARD_TILE, dtype, aligned))
    return next((tile for tile in tiles if columns <= tile.columns), long)


def backward(
    dtype: str, weight: str, rms: bool, columns: int, aligned: bool, capability: Capability
) -> NormBwd | NormBwdCluster | None:
    """The kernel for rows of ``columns``, None where they are too long for it."""
    tiles = _backward_configs(dtype, weight, rms, aligned, capability)
    return next((tile for tile in tiles if columns <= tile.columns), None)


def long_backward(
    dtype: str, weight: str, rms: bool, aligned: bool
) -> tuple[NormBwdLong, NormBwdWeight]:
    """The two kernels for rows of any length."""
    tile = _long_tile(LONG_BACKWARD_TILE, dtype, aligned)
    return NormBwdLong(dtype, weight, rms, *tile), NormBwdWeight(dtype, rms, tile[-1])


def sum_partials(weight: str, rows: int) -> SumPartials:
    """The kernel for this many shares."""
    return SumPartials(weight, FEW_WARPS) if rows <= FEW_SHARES else SumPartials(weight)


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Everything that the four above can return."""
    for weight in ITEM_SIZE:
        yield from (sum_partials(weight, FEW_SHARES), sum_partials(weight, FEW_SHARES + 1))
    switches = (False, True)
    for dtype, rms, aligned in itertools.product(ITEM_SIZE, switches, switches):
        for weight in weight_dtypes(dtype):
            for tile in _tiles(FORWARD_TILES, dtype, aligned):
                yield NormFwd(dtype, weight, rms, *tile)
            yield from _backward_configs(dtype, weight, rms, aligned, capability)
            yield NormFwdLong(dtype, weight, rms, *_long_tile(LONG_FORWARD_TILE, dtype, aligned))
            long, of_weight = long_backward(dtype, weight, rms, aligned)
            yield long
        yield of_weight


def _tiles(
    tiles: tuple[tuple[int, int, int], ...], dtype: str, aligned: bool
) -> list[tuple[int, int, int, int]]:
    """(row_threads, loads, vector, blocks) of each tile."""
    if aligned:
        return [(threads, loads, vector_width(dtype), blocks) for threads, loads, blocks in tiles]
    by_threads = dict.fromkeys(threads for threads, *_ in tiles)
    blocks = {x: max(1, ELEMENT_THREADS // max(MIN_BLOCK_THREADS, x)) for x in by_threads}
    return [(threads, ELEMENT_LOADS, 1, blocks[threads]) for threads in by_threads]


def _backward_configs(
    dtype: str, weight: str, rms: bool, aligned: bool, capability: Capability
) -> Iterator[NormBwd | NormBwdCluster]:
    """The shortest rows first."""
    if capability < (7, 5):  # the barrier of all blocks needs acquire and release of sm_70
        return
    first = (dtype, weight, rms)
    if aligned:
        tiles = [(threads, loads, vector_width(dtype), n) for threads, loads, n in BACKWARD_TILES]
    else:
        by_threads = dict.fromkeys(threads for threads, *_ in BACKWARD_TILES)
        tiles = [(x, ELEMENT_LOADS, 1, ELEMENT_THREADS) for x in by_threads]
    room = shared_memory(capability) - STATIC_MEMORY
    asynchronous = aligned and capability >= (8, 0)
    for row_threads, loads, vector, threads in tiles:
        row_bytes = stage_bytes(row_threads, loads, vector)
        rows = min(threads // row_threads, room // (2 * row_bytes if asynchronous else row_bytes))
        threads = rows * row_threads
        stages = min(room // (rows * row_bytes), MAX_STAGES) if asynchronous else 1
        yield NormBwd(*first, row_threads, loads, vector, threads, stages)
    if aligned and capability[0] == 9:
        for cluster in CLUSTERS:
            yield NormBwdCluster(*first, cluster, threads, loads, vector, stages)


def shared_memory(capability: Capability) -> int:
    """Bytes that a block may have."""
    return 1024 * SHARED_MEMORY.get(capability, 99)


def stage_bytes(threads: int, loads: int, vector: int) -> int:
    """Of what this many threads have of their rows of x, dout and dresidual."""
    return 3 * threads * loads * (16 if vector > 1 else 4)


def _long_tile(tile: tuple[int, int], dtype: str, aligned: bool) -> tuple[int, int, int]:
    """(threads, loads, vector)."""
    threads, loads = tile
    return (threads, loads, vector_width(dtype)) if aligned else (threads, ELEMENT_LOADS, 1)
