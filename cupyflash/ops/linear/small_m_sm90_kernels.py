"""Projections of small M on Hopper: wgmma tensor cores fed by the copy engine, half precision."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ...runtime.config import KernelConfig
from ...runtime.gpu import HALF, Capability, architecture
from . import sm90_kernels
from .kernels import epilogues
from .sm90_kernels import BLOCK_K, WARPGROUP, Rotary

MAPPED = ("x", "weight", "gate_weight")  # the arrays with a tensor map
ROWS = (8, 16, 32)  # rows of x in a tile
CLUSTERS = (1, 2, 4, 8)
FEATURES = 64  # rows of weights of a block
WANTED_STAGES = 4  # fewer do not keep the copy engine busy
IN_FLIGHT = 96 * 1024  # bytes on their way to a multiprocessor; with more they come later
# A multiprocessor has SHARED_MEMORY bytes. Of each block the system takes RESERVED and the barriers
# take BARRIERS, which lets the tiles begin at a multiple of 1024.
SHARED_MEMORY, RESERVED, BARRIERS = 233472, 1024, 1024

BUSY = 0.8  # so large a part of the multiprocessors is as good as all of them
# linear_small_m is faster for up to LONG_ROWS rows of x if the weights have LONG_BYTES bytes for
# each of them, in rows of at least LONG_DEPTH columns. It deals the weights out evenly, not in
# tiles, and its latencies do not count beside the time to read so many.
LONG_BYTES, LONG_DEPTH, LONG_ROWS = 2**24, 2048, 4
FUSED_ROWS = 8  # for more of such a depth what `is_apart` names is a kernel of its own


@dataclasses.dataclass(frozen=True)
class LinearSmallMSm90(KernelConfig):
    """Up to ``rows`` rows; see linear_small_m_sm90.cu.

    Attributes:
        gated: half of the rows of weights of a block are those of the gate.
        rotary: half of them are those of the columns with which the others are turned.
        cluster: blocks that share the depth; a block alone makes one tile after the other.
    """

    source: ClassVar[str] = "linear/linear_small_m_sm90.cu"
    dependent: ClassVar[bool] = True
    threads: ClassVar[int] = WARPGROUP + 32  # a warpgroup that multiplies, and a warp that loads

    dtype: str
    activation: str
    gated: bool
    rotary: bool
    rows: int
    cluster: int

    @property
    def norm_threads(self) -> int:
        """The threads of a block if there is a norm, which another warpgroup helps to compute."""
        return self.threads + WARPGROUP

    @property
    def shared_memory(self) -> int:
        """The most dynamic shared memory of a block in bytes; a launch asks for what it needs."""
        return SHARED_MEMORY - RESERVED - BARRIERS

    @property
    def columns(self) -> int:
        """Columns of ``out`` that a cluster makes."""
        return FEATURES // 2 if self.gated else FEATURES

    @property
    def map_rows(self) -> dict[str, int]:
        """Rows of a TMA tile, for each tensor map."""
        half = FEATURES // (1 + (self.gated or self.rotary))
        return {"x": self.rows, "weight": half, "gate_weight": half}

    def tiles(self, columns: int) -> int:
        """Tiles of all blocks: one of ``out`` is `cluster` tiles, each with a part of the depth."""
        return -(-columns // self.columns) * self.cluster

    def grid(self, rows: int, columns: int, multiprocessors: int) -> int:
        tiles = self.tiles(columns)
        return min(tiles, multiprocessors) if self.cluster == 1 else tiles

    def busy(self, columns: int, multiprocessors: int) -> float:
        """The part of the multiprocessors that has something to do, in the mean."""
        tiles = self.tiles(columns)
        rounds = -(-tiles // multiprocessors) if self.cluster == 1 else 1
        return min(1.0, tiles / multiprocessors / rounds)

    def steps(self, depth: int) -> int:
        """Steps of 64 of the depth that a block has at most."""
        return -(-depth // (BLOCK_K * self.cluster))

    def smem_bytes(self, stages: int, depth: int, norm: bool) -> int:
        """Dynamic shared memory of a block."""
        x, weights = self.rows * BLOCK_K * 2, FEATURES * BLOCK_K * 2
        sums, row_sums = FEATURES * (self.rows + 2) * 4, self.cluster * self.rows * 8
        kept = self.steps(depth) * (x + 2 * BLOCK_K * 4) if norm else 0
        return kept + stages * (weights if norm else weights + x) + sums + row_sums

    def stages(self, columns: int, depth: int, norm: bool, multiprocessors: int) -> int:
        """Stages of the ring if all blocks are on the GPU at once; 0 where they have no room."""
        grid = self.grid(self.rows, columns, multiprocessors)
        steps = self.steps(depth) * -(-self.tiles(columns) // grid)  # in a block
        kept, blocks = self.smem_bytes(0, depth, norm), -(-grid // multiprocessors)
        stage = self.smem_bytes(1, depth, norm) - kept
        room = SHARED_MEMORY // blocks - RESERVED - BARRIERS - kept
        stages = min(room // stage, steps, max(IN_FLIGHT // blocks // stage, WANTED_STAGES))
        return stages if stages >= min(steps, WANTED_STAGES) else 0


def choose(
    dtype: str,
    capability: Capability,
    epilogue: tuple[str, bool, bool],
    norm: bool,
    sizes: tuple[int, int, int],
    strides: tuple[int, ...],
    multiprocessors: int,
) -> LinearSmallMSm90 | None:
    """The kernel for (rows, columns, depth), None where there is none.

    The epilogue is (activation, gated, rotary). The strides are those of the rows of x and of the
    weights. As few blocks share the depth as have all multiprocessors at work.
    """
    rows, columns, depth = sizes
    if rows > ROWS[-1] or not sm90_kernels.supports(dtype, capability, rows, 8, depth, strides):
        return None
    tile = next(tile for tile in ROWS if rows <= tile)
    steps = -(-depth // BLOCK_K)
    offered = [
        LinearSmallMSm90(dtype, *epilogue, tile, cluster)
        for cluster in CLUSTERS
        if cluster <= steps
    ]
    busy = [x for x in offered if x.busy(columns, multiprocessors) >= BUSY]
    fitting = (x for x in busy or offered[-1:] if x.stages(columns, depth, norm, multiprocessors))
    return next(fitting, None)


def turns(rotary: Rotary) -> bool:
    """True if both numbers of each pair are in the same tile, so that the kernel can turn them."""
    half, whole = rotary.head_dim // 2, rotary.rotary_dim == rotary.head_dim
    return whole and half % (FEATURES // 2) == 0 and not rotary.interleaved


def is_long(rows: int, columns: int, depth: int) -> bool:
    """True if linear_small_m is faster, should it have room; ``columns`` are of all weights."""
    deep = rows <= LONG_ROWS and depth >= LONG_DEPTH
    return deep and columns * depth * 2 >= rows * LONG_BYTES


def is_apart(rows: int, depth: int) -> bool:
    """True if a norm, or a rotary embedding without `turns`, is faster as a kernel of its own.

    Every block would do the norm again, and linear_small_m, which can turn anything, gets slow.
    """
    return rows > FUSED_ROWS and depth >= LONG_DEPTH


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Everything that `choose` can return."""
    if not architecture(capability).wgmma:
        return
    for epilogue in epilogues():
        for dtype, rows, cluster in itertools.product(HALF, ROWS, CLUSTERS):
            yield LinearSmallMSm90(dtype, *epilogue, rows, cluster)
