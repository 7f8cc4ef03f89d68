"""LayerNorm and RMSNorm: who holds how much of a row."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ..kernel_config import ITEM_SIZE, KernelConfig
from ..norm_params import NormBwdParams, NormFwdParams, SumPartialsParams

MIN_BLOCK_THREADS = 128  # as in row_tile.cuh
# (threads of a row, loads of a thread, blocks of a multiprocessor at a time), the shortest rows
# first. Loads are of 16 bytes; in the backward a thread has registers for the next row too.
FORWARD_TILES = (
    *((8, 1, 8), (32, 1, 8), (32, 2, 6), (32, 3, 5), (32, 4, 4)),
    *((64, 3, 10), (64, 4, 8), (128, 3, 5), (128, 4, 4), (256, 3, 2), (256, 4, 2)),
    *((512, 4, 1), (1024, 4, 1)),
)
BACKWARD_TILES = (
    *((8, 2, 4), (32, 2, 4), (32, 3, 3), (32, 4, 2)),
    *((64, 3, 6), (64, 4, 4), (128, 3, 3), (128, 4, 2), (256, 3, 1), (512, 2, 1)),
)
# Longer rows pass through in pieces: (threads, loads).
LONG_FORWARD_TILE = (512, 4)
LONG_BACKWARD_TILE = (1024, 1)
ELEMENT_LOADS = 8  # where a thread reads element by element
ELEMENT_THREADS = 512  # of a multiprocessor then


def weight_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes of weight and bias beside a tensor of ``dtype``."""
    return tuple(dict.fromkeys((dtype, "float32")))


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


class NormBwd(RowConfig):
    """Backward of rows that fit into registers, with shares of the gradient of weight and bias."""

    source: ClassVar[str] = "norm/norm_bwd.cu"
    params: ClassVar[type[NormBwdParams]] = NormBwdParams


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
    """Adds shares of the gradient of weight and bias up."""

    source: ClassVar[str] = "norm/sum_partials.cu"
    params: ClassVar[type[SumPartialsParams]] = SumPartialsParams

    weight: str

    @property
    def threads(self) -> int:
        """Threads of a block, which has 32 columns."""
        return 1024


def forward(
    dtype: str, weight: str, rms: bool, columns: int, aligned: bool
) -> NormFwd | NormFwdLong:
    """The kernel for rows of ``columns``, read 16 bytes at a time where that is possible."""
    tiles = (NormFwd(dtype, weight, rms, *tile) for tile in _tiles(FORWARD_TILES, dtype, aligned))
    long = NormFwdLong(dtype, weight, rms, *_long_tile(LONG_FORWARD_TILE, dtype, aligned))
    return next((tile for tile in tiles if columns <= tile.columns), long)


def backward(dtype: str, weight: str, rms: bool, columns: int, aligned: bool) -> NormBwd | None:
    """The kernel for rows of ``columns``, None where they are too long for it."""
    tiles = (NormBwd(dtype, weight, rms, *tile) for tile in _tiles(BACKWARD_TILES, dtype, aligned))
    return next((tile for tile in tiles if columns <= tile.columns), None)


def long_backward(
    dtype: str, weight: str, rms: bool, aligned: bool
) -> tuple[NormBwdLong, NormBwdWeight]:
    """The two kernels for rows of any length."""
    tile = _long_tile(LONG_BACKWARD_TILE, dtype, aligned)
    return NormBwdLong(dtype, weight, rms, *tile), NormBwdWeight(dtype, rms, tile[-1])


def configurations(capability: tuple[int, int]) -> Iterator[KernelConfig]:
    """Everything that the three above can return, and `SumPartials`."""
    yield from map(SumPartials, ITEM_SIZE)
    switches = (False, True)
    for dtype, rms, aligned in itertools.product(ITEM_SIZE, switches, switches):
        for weight in weight_dtypes(dtype):
            for tile in _tiles(FORWARD_TILES, dtype, aligned):
                yield NormFwd(dtype, weight, rms, *tile)
            for tile in _tiles(BACKWARD_TILES, dtype, aligned):
                yield NormBwd(dtype, weight, rms, *tile)
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


def _long_tile(tile: tuple[int, int], dtype: str, aligned: bool) -> tuple[int, int, int]:
    """(threads, loads, vector)."""
    threads, loads = tile
    return (threads, loads, vector_width(dtype)) if aligned else (threads, ELEMENT_LOADS, 1)
