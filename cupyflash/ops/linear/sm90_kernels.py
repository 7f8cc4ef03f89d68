"""The kernel of projections of many rows on Hopper (wgmma, TMA) and the choice of its tile.

It computes float16 and bfloat16, and needs compute capability 9.0 itself: its instructions (sm_90a)
exist on no other GPU.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from ...runtime.config import KernelConfig
from ...runtime.gpu import HALF, architecture
from ...runtime.structs import header
from .kernels import ACTIVATIONS

WARPGROUP = header("ptx/warpgroup.cuh").WARPGROUP  # threads
BLOCK_K = 64  # depth of a step: 128 bytes, the widest box of a tensor map
OUT_TILE_ROWS = 16  # rows of out that a warp stores at a time
ALIGNMENT = 8  # elements: tensor maps want addresses and strides that are multiples of 16 bytes
MAX_ROWS = 2**31 - 512  # the last tile of a cluster must not end beyond 2^31
OUT_BUFFERS = 8 * 2 * OUT_TILE_ROWS * 64 * 2  # bytes: two buffers for each warp of the consumers

# `Tile.clocks` models the time in clocks of a multiprocessor, of which each has
TENSOR_FLOPS = 3200  # measured; 4096 are the peak, which is not held at full power
SHARED_BYTES = 128  # read from or written to shared memory
L2_BYTES = 32  # read from L2, where all multiprocessors read
L2_BYTES_ALONE = 64
START = 3000  # clocks of a launch and of the first loads
TILE_START = 300
# Clocks of the issue slots and special functions for each number of a thread, with its store.
EPILOGUE_CLOCKS = {"none": 4, "relu": 5, "silu": 18, "gelu_tanh": 20, "gelu": 28}


class Rotary(NamedTuple):
    """A rotary embedding that is a part of the kernel; head_dim 0 for none."""

    head_dim: int = 0
    rotary_dim: int = 0
    interleaved: bool = False


NO_ROTARY = Rotary()
LISTED_ROTARY = (Rotary(64, 64), Rotary(128, 128), Rotary(128, 64), Rotary(64, 64, True))


class Epilogue(NamedTuple):
    """The operations that follow the product."""

    activation: str = "none"
    gated: bool = False
    residual: bool = False
    rotary: Rotary = NO_ROTARY


class Tile(NamedTuple):
    """A tile of ``out`` and how it is computed; see linear_sm90.cu.

    Attributes:
        block_n: rows of weights; with a gate, half of them are rows of gate_weight.
        pingpong: whether the two warpgroups have a tile each, not half of the same one each.
        cluster: blocks that share weights.
    """

    block_m: int
    block_n: int
    stages: int
    pingpong: bool
    cluster: int

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.stages * (self.block_m + self.block_n) * BLOCK_K * 2 + OUT_BUFFERS

    def fits(self, epilogue: Epilogue) -> bool:
        """Whether the tile has whole column blocks of ``out``, and whole heads."""
        if epilogue.gated and self.block_n % 128:
            return False
        head_dim = epilogue.rotary.head_dim
        return not head_dim or self.block_n % head_dim == 0

    def out_columns(self, epilogue: Epilogue) -> int:
        """Columns of ``out`` in a tile."""
        return self.block_n // 2 if epilogue.gated else self.block_n

    def clusters(self, rows: int, columns: int, epilogue: Epilogue) -> int:
        """Number of clusters that cover ``out``."""
        height = self.block_m * self.cluster
        return -(-rows // height) * -(-columns // self.out_columns(epilogue))

    def clocks(
        self, rows: int, columns: int, depth: int, multiprocessors: int, epilogue: Epilogue
    ) -> float:
        """A model of the time: the steps of the busiest block, and work that they do not hide."""
        clusters = self.clusters(rows, columns, epilogue)
        at_once = max(1, multiprocessors // self.cluster)
        active = min(clusters, at_once) * self.cluster / multiprocessors
        numbers = self.block_m * self.block_n  # sums of a tile
        bytes_in = (self.block_m + self.block_n) * BLOCK_K * 2
        bytes_l2 = (self.block_m + self.block_n // self.cluster) * BLOCK_K * 2
        bytes_read = self.block_m // 64 * (64 + self.block_n) * BLOCK_K * 2  # wgmma reads
        step = max(
            2 * numbers * BLOCK_K / TENSOR_FLOPS,
            (bytes_in + bytes_read) / SHARED_BYTES,
            bytes_l2 / min(L2_BYTES_ALONE, L2_BYTES / active),
        )
        product = -(-depth // BLOCK_K) * step
        outputs = self.block_m * self.out_columns(epilogue)
        finish = outputs // WARPGROUP * EPILOGUE_CLOCKS[epilogue.activation]
        tiles = -(-clusters // at_once)
        if self.pingpong:
            return START + tiles * max(product, (product + finish) / 2) + finish
        return START + tiles * (product + finish + TILE_START)


TILES = (
    Tile(128, 256, 4, False, 2),
    Tile(128, 192, 4, True, 2),
    Tile(128, 128, 6, True, 2),
    Tile(128, 128, 6, True, 1),
    Tile(64, 64, 12, True, 1),
)


@dataclasses.dataclass(frozen=True)
class LinearSm90(KernelConfig):
    """A projection: two warpgroups multiply tiles that a third one loads."""

    source: ClassVar[str] = "linear/linear_sm90.cu"
    threads: ClassVar[int] = 3 * WARPGROUP

    dtype: str
    activation: str
    gated: bool
    residual: bool
    head_dim: int
    rotary_dim: int
    interleaved: bool
    block_m: int
    block_n: int
    stages: int
    pingpong: bool
    cluster: int
    smem_bytes: int

    @property
    def rotary(self) -> bool:
        """Whether it rotates q and k."""
        return self.head_dim > 0

    @property
    def tile(self) -> Tile:
        """The shape of the tile."""
        return Tile(self.block_m, self.block_n, self.stages, self.pingpong, self.cluster)

    @property
    def epilogue(self) -> Epilogue:
        """The operations that follow the product."""
        rotary = Rotary(self.head_dim, self.rotary_dim, self.interleaved)
        return Epilogue(self.activation, self.gated, self.residual, rotary)

    @property
    def map_rows(self) -> dict[str, int]:
        """Rows of a TMA tile, for each tensor map."""
        weights = self.block_n // 2 if self.gated or self.cluster == 2 else self.block_n
        return {
            "x": self.block_m,
            "weight": weights,
            "gate_weight": weights,
            "residual": self.block_m,
            "out": OUT_TILE_ROWS,
        }

    def grid(self, rows: int, columns: int, multiprocessors: int) -> int:
        """Number of blocks: whole clusters, as many as run at the same time at most."""
        clusters = self.tile.clusters(rows, columns, self.epilogue)
        return min(clusters, max(1, multiprocessors // self.cluster)) * self.cluster


def supports(
    dtype: str,
    capability: tuple[int, int],
    rows: int,
    columns: int,
    depth: int,
    strides: tuple[int, ...],
) -> bool:
    """Whether the kernel computes such a projection, whose arrays have rows with these strides.

    The addresses of all its arrays, bias included, must be multiples of 16 bytes as well.
    """
    sizes = (columns, depth, *strides)
    aligned = all(x > 0 and x % ALIGNMENT == 0 and x < 2**39 for x in sizes)
    return dtype in HALF and architecture(capability).wgmma and 0 < rows <= MAX_ROWS and aligned


def turns(rotary: Rotary) -> bool:
    """Whether each thread of the kernel has both numbers of a pair, so that it can turn them.

    It walks over blocks of eight columns, of which a head must have a whole number.
    """
    head_dim, rotary_dim, interleaved = rotary
    unit = 8 if interleaved else 16
    whole = 0 < rotary_dim <= head_dim and rotary_dim % unit == 0 and head_dim % 8 == 0
    return whole and any(tile.fits(Epilogue(rotary=rotary)) for tile in TILES)


def choose(
    dtype: str,
    rows: int,
    columns: int,
    depth: int,
    multiprocessors: int,
    epilogue: Epilogue = Epilogue(),  # noqa: B008 - immutable
) -> LinearSm90:
    """The kernel whose tile takes the least time, by the model of `Tile.clocks`.

    ``epilogue.rotary`` is none, or one that the kernel `turns`.
    """
    problem = (rows, columns, depth, multiprocessors, epilogue)
    tiles = (tile for tile in TILES if tile.fits(epilogue))
    return configuration(dtype, min(tiles, key=lambda tile: tile.clocks(*problem)), epilogue)


def configuration(dtype: str, tile: Tile, epilogue: Epilogue) -> LinearSm90:
    """The kernel with this tile."""
    *switches, rotary = epilogue
    return LinearSm90(dtype, *switches, *rotary, *tile, tile.smem_bytes)


def configurations(capability: tuple[int, int]) -> Iterator[KernelConfig]:
    """Everything that `choose` can return, with the usual rotary embeddings only."""
    if not architecture(capability).wgmma:
        return
    for dtype, tile, epilogue in itertools.product(HALF, TILES, epilogues()):
        if tile.fits(epilogue):
            yield configuration(dtype, tile, epilogue)


def epilogues() -> Iterator[Epilogue]:
    """Every `Epilogue` that `configurations` compiles."""
    for activation, gated, residual in itertools.product(ACTIVATIONS, (False, True), (False, True)):
        if not gated or activation != "none":
            yield Epilogue(activation, gated, residual)
    yield from (Epilogue(rotary=rotary) for rotary in LISTED_ROTARY)
