"""LayerNorm and RMSNorm: which kernels a signature takes, with which tile."""

import itertools
from collections.abc import Iterator

from ...runtime.config import ITEM_SIZE, KernelConfig, vector_width, weight_dtypes
from ...runtime.gpu import Capability, architecture
from .configs import (
    DropoutAdd,
    NormBwd,
    NormBwdCluster,
    NormBwdLong,
    NormBwdWeight,
    NormFwd,
    NormFwdCluster,
    NormFwdLong,
    SumPartials,
    block_threads,
    stage_bytes,
)

# (threads of a row, loads of a thread, blocks of a multiprocessor at a time), the shortest rows
# first. Loads are of 16 bytes.
FORWARD_TILES = (
    *((8, 1, 8), (32, 1, 8), (32, 2, 8), (32, 3, 6), (32, 4, 6), (64, 3, 12), (64, 4, 12)),
    *((128, 3, 7), (512, 1, 4), (256, 3, 3), (512, 2, 3), (512, 4, 2)),
)
# (threads of a row, loads of a thread, threads of a block), a block on each multiprocessor.
BACKWARD_TILES = (
    *((8, 2, 512), (32, 2, 512), (32, 3, 256), (64, 2, 512), (64, 3, 384), (128, 2, 512)),
    *((128, 3, 384), (512, 1, 512), (512, 2, 512)),
)
CLUSTERS = 2, 4, 8  # blocks that share a longer row, each with the last of these tiles
# Forward, in clusters of 4 and 8: (threads, loads, blocks of a multiprocessor).
FORWARD_CLUSTER_TILES = (256, 3, 5), (256, 4, 4)
# A multiprocessor has at most WIDE_THREADS threads where weights wider than x take the registers of
# WIDE_LOADS loads.
WIDE_LOADS, WIDE_THREADS = 4, 768
# __launch_bounds__ leaves registers for so many threads of a multiprocessor, and for 1024 on other
# GPUs: sm_75 has no more threads, sm_86 and sm_89 have 1536, and sm_100 and sm_120 would spill.
RESIDENT_THREADS = {(8, 0): 2048, (9, 0): 2048}
MAX_STAGES = 3  # rows of a thread on their way
STATIC_MEMORY = 3 << 10  # __shared__ variables of a block, at most
# Longer rows pass through these tiles in pieces: (threads, loads).
LONG_FORWARD_TILE = (512, 4)
LONG_BACKWARD_TILE = (1024, 1)
ELEMENT_LOADS = 8  # where a thread reads element by element
ELEMENT_THREADS = 512  # of these on a multiprocessor
FEW_SHARES, FEW_WARPS = 32, 4  # sum_partials, where a block has little to add up


def forward(
    dtype: str, weight: str, rms: bool, columns: int, aligned: bool, capability: Capability
) -> NormFwd | NormFwdCluster | NormFwdLong:
    """The kernel for rows of ``columns``, read 16 bytes at a time where that is possible."""
    tiles = _forward_configs(dtype, weight, rms, aligned, capability)
    return next(tile for tile in tiles if columns <= tile.columns)


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
    """The kernel for this many partial sums."""
    return SumPartials(weight, FEW_WARPS) if rows <= FEW_SHARES else SumPartials(weight)


def dropout_add(dtype: str, out: str, aligned: bool) -> DropoutAdd:
    """The kernel, which reads 16 bytes of x at a time where that is possible."""
    return DropoutAdd(dtype, out, vector_width(dtype) if aligned else 1)


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Everything that the functions above can return."""
    switches = (False, True)
    for dtype, aligned in itertools.product(ITEM_SIZE, switches):
        yield from (dropout_add(dtype, out, aligned) for out in weight_dtypes(dtype))
    for weight in ITEM_SIZE:
        yield from (sum_partials(weight, FEW_SHARES), sum_partials(weight, FEW_SHARES + 1))
    for dtype, rms, aligned in itertools.product(ITEM_SIZE, switches, switches):
        for weight in weight_dtypes(dtype):
            yield from _forward_configs(dtype, weight, rms, aligned, capability)
            yield from _backward_configs(dtype, weight, rms, aligned, capability)
            yield from long_backward(dtype, weight, rms, aligned)


def _forward_configs(
    dtype: str, weight: str, rms: bool, aligned: bool, capability: Capability
) -> Iterator[NormFwd | NormFwdCluster | NormFwdLong]:
    """The shortest rows first."""
    if aligned:
        tiles, vector = FORWARD_TILES, vector_width(dtype)
    else:
        by_threads = sorted({threads for threads, *_ in FORWARD_TILES})
        tiles = [(x, ELEMENT_LOADS, ELEMENT_THREADS // block_threads(x)) for x in by_threads]
        vector = 1
    wide = ITEM_SIZE[weight] > ITEM_SIZE[dtype]

    def resident(blocks: int, threads: int, loads: int) -> int:
        if wide and loads == WIDE_LOADS:
            blocks = min(blocks, WIDE_THREADS // threads)
        return min(blocks, RESIDENT_THREADS.get(capability, 1024) // threads)

    for row_threads, loads, blocks in tiles:
        blocks = resident(blocks, block_threads(row_threads), loads)
        yield NormFwd(dtype, weight, rms, row_threads, loads, vector, blocks)
    if aligned and architecture(capability).wgmma:
        for cluster, tile in itertools.product(CLUSTERS[1:], FORWARD_CLUSTER_TILES):
            threads, loads, blocks = tile
            blocks = resident(blocks, threads, loads)
            yield NormFwdCluster(dtype, weight, rms, cluster, threads, loads, vector, blocks)
    yield NormFwdLong(dtype, weight, rms, *_long_tile(LONG_FORWARD_TILE, dtype, aligned))


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
    room = 1024 * architecture(capability).shared_memory - STATIC_MEMORY
    asynchronous = aligned and architecture(capability).copies >= 80
    for row_threads, loads, vector, threads in tiles:
        row_bytes = stage_bytes(row_threads, loads, vector)
        rows = min(threads // row_threads, room // (2 * row_bytes if asynchronous else row_bytes))
        threads = rows * row_threads
        stages = min(room // (rows * row_bytes), MAX_STAGES) if asynchronous else 1
        yield NormBwd(*first, row_threads, loads, vector, threads, stages)
    if aligned and architecture(capability).wgmma:
        for cluster in CLUSTERS:
            yield NormBwdCluster(*first, cluster, threads, loads, vector, stages)


def _long_tile(tile: tuple[int, int], dtype: str, aligned: bool) -> tuple[int, int, int]:
    """(threads, loads, vector)."""
    threads, loads = tile
    return (threads, loads, vector_width(dtype)) if aligned else (threads, ELEMENT_LOADS, 1)
