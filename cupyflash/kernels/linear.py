"""Projections: the kernels of few rows and of many, and who takes which."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ..kernel_config import ITEM_SIZE, KernelConfig
from ..linear_params import LinearParams, MlpParams, Rotary
from .norm import vector_width

Capability = tuple[int, int]  # compute capability: (major, minor)

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu")  # as in activation.cuh
SWITCHES = (False, True)

MAX_FEW_ROWS = 16
FEW_ROWS = (8, MAX_FEW_ROWS)  # of the tiles of linear_few and mlp_few
FEW_WARPS = 16  # as in few_rows.cuh
TILE_PAIRS = 8
STEP_BYTES = 64  # of a row of weights, that four lanes read at once
SUMS_PITCH = 20  # floats
MAX_MLP_COLUMNS = 2**26  # of out: its elements are counted in 32 bits

# Shared memory of a block, by compute capability; 99 KB where nothing is said.
SHARED_MEMORY = {(7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}


@dataclasses.dataclass(frozen=True)
class LinearConfig(KernelConfig):
    """A kernel that computes a projection; the parameters of its tile follow.

    Attributes:
        gated: activation(gate) * up of two weights, instead of activation of one.
        rotary: turns q and k.
    """

    params: ClassVar[type[LinearParams]] = LinearParams

    dtype: str
    activation: str
    gated: bool
    rotary: bool

    def grid(self, rows: int, columns: int, multiprocessors: int) -> int:
        """Number of blocks."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LinearFew(LinearConfig):
    """Up to ``rows`` rows; ``vector`` elements of a weight in a load.

    Attributes:
        arch: 80, or 75 for what Turing's tensor cores cannot do.
    """

    source: ClassVar[str] = "linear/linear_few.cu"

    rows: int
    vector: int
    arch: int
    smem_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return FEW_WARPS * 32

    def grid(self, rows: int, columns: int, multiprocessors: int) -> int:
        """Number of blocks."""
        pairs = columns if self.gated else -(-columns // 2)
        return min(-(-pairs // TILE_PAIRS), multiprocessors)


@dataclasses.dataclass(frozen=True)
class MlpFew(KernelConfig):
    """A whole MLP of up to ``rows`` rows; everything as in `LinearFew`.

    Attributes:
        unit: hidden columns that a block computes at once.
    """

    source: ClassVar[str] = "linear/mlp_few.cu"
    params: ClassVar[type[MlpParams]] = MlpParams
    cooperative: ClassVar[bool] = True

    dtype: str
    activation: str
    gated: bool
    rows: int
    vector: int
    arch: int
    smem_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return FEW_WARPS * 32

    @property
    def unit(self) -> int:
        return TILE_PAIRS if self.gated else 2 * TILE_PAIRS


@dataclasses.dataclass(frozen=True)
class LinearMma(LinearConfig):
    """Many rows on mma.sync; ``vector`` as in `LinearFew`."""

    source: ClassVar[str] = "linear/linear_mma.cu"
    block: ClassVar[int] = 128  # rows and columns of a tile; half as many columns if gated

    vector: int
    num_stages: int
    arch: int
    smem_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 256

    def grid(self, rows: int, columns: int, multiprocessors: int) -> int:
        """Number of blocks."""
        block_columns = self.block // 2 if self.gated else self.block
        return -(-rows // self.block) * -(-columns // block_columns)


@dataclasses.dataclass(frozen=True)
class LinearSimt(KernelConfig):
    """Many rows without tensor cores."""

    source: ClassVar[str] = "linear/linear_simt.cu"
    params: ClassVar[type[LinearParams]] = LinearParams
    rotary: ClassVar[bool] = False
    block: ClassVar[int] = 64

    dtype: str
    activation: str
    gated: bool

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128

    def grid(self, rows: int, columns: int, multiprocessors: int) -> int:
        """Number of blocks."""
        return -(-rows // self.block) * -(-columns // self.block)


@dataclasses.dataclass(frozen=True)
class RotaryEmbedding(KernelConfig):
    """Turns q and k where they are, after a projection that does not do it itself."""

    source: ClassVar[str] = "linear/rotary_embedding.cu"
    params: ClassVar[type[LinearParams]] = LinearParams

    dtype: str

    @property
    def threads(self) -> int:
        """Threads of a block, a pair of numbers each."""
        return 256

    def grid(self, rows: int, rotary: Rotary) -> int:
        """Number of blocks."""
        pairs = rows * (rotary.columns // rotary.head_dim) * (rotary.rotary_dim // 2)
        return -(-pairs // self.threads)


def shared_memory(capability: Capability) -> int:
    """Bytes that a block may have."""
    return 1024 * SHARED_MEMORY.get(capability, 99)


def row_bytes(dtype: str, depth: int) -> int:
    """Of a row of x in shared memory, as in few_rows.cuh."""
    used = -(-depth * ITEM_SIZE[dtype] // STEP_BYTES) * STEP_BYTES
    return (used + 63) // 128 * 128 + 64


def few_bytes(config: "LinearFew | MlpFew", rows: int, depth: int) -> int:
    """Shared memory that x as a whole takes, with what the kernel needs besides."""
    sums = FEW_WARPS * config.rows * SUMS_PITCH * 4 + 2 * MAX_FEW_ROWS * 4
    return sums + rows * row_bytes(config.dtype, depth)


def few(
    dtype: str,
    activation: str,
    gated: bool,
    rotary: bool,
    rows: int,
    depth: int,
    aligned: bool,
    capability: Capability,
) -> LinearFew | None:
    """The kernel for so few rows, None where there is none or x does not fit."""
    tail = _few_tail(dtype, rows, aligned, capability)
    if tail is None:
        return None
    config = LinearFew(dtype, activation, gated, rotary, *tail)
    return config if few_bytes(config, rows, depth) <= config.smem_bytes else None


def few_mlp(
    dtype: str,
    activation: str,
    gated: bool,
    rows: int,
    sizes: tuple[int, int, int],
    aligned: bool,
    capability: Capability,
    multiprocessors: int,
) -> MlpFew | None:
    """The kernel for a whole MLP of sizes (d_in, d_hidden, d_out), None as `few`."""
    tail = _few_tail(dtype, rows, aligned, capability)
    depth, hidden, columns = sizes
    if tail is None or columns > MAX_MLP_COLUMNS:
        return None
    config = MlpFew(dtype, activation, gated, *tail)
    units = -(-hidden // config.unit)
    share = -(-units // multiprocessors) * config.unit
    size = few_bytes(config, rows, depth) + rows * row_bytes(dtype, share)
    return config if size <= config.smem_bytes else None


def many(
    dtype: str,
    activation: str,
    gated: bool,
    rotary: bool,
    aligned: bool,
    capability: Capability,
    family: str | None,
) -> LinearMma | LinearSimt:
    """The kernel for any number of rows."""
    if family == "simt" or not _has_mma(dtype, capability):
        return LinearSimt(dtype, activation, gated)
    return LinearMma(dtype, activation, gated, rotary, *_mma_tail(dtype, aligned, capability))


def _has_mma(dtype: str, capability: Capability) -> bool:
    oldest = {"float16": (7, 5), "bfloat16": (8, 0)}.get(dtype)
    return oldest is not None and capability >= oldest


def _arch(capability: Capability) -> int:
    return 80 if capability >= (8, 0) else 75


def _few_tail(
    dtype: str, rows: int, aligned: bool, capability: Capability
) -> tuple[int, int, int, int] | None:
    """(rows, vector, arch, smem_bytes)."""
    if rows > MAX_FEW_ROWS or capability < (7, 5):
        return None
    tile = next(tile for tile in FEW_ROWS if rows <= tile)
    vector = vector_width(dtype) if aligned else 1
    return tile, vector, _arch(capability), shared_memory(capability)


def _mma_tail(dtype: str, aligned: bool, capability: Capability) -> tuple[int, int, int, int]:
    """(vector, num_stages, arch, smem_bytes)."""
    stages = 4 if capability >= (8, 0) else 2
    return vector_width(dtype) if aligned else 1, stages, _arch(capability), stages * 16384


def epilogues() -> Iterator[tuple[str, bool, bool]]:
    """(activation, gated, rotary) of every projection."""
    yield from ((activation, False, False) for activation in ACTIVATIONS)
    yield from ((activation, True, False) for activation in ACTIVATIONS)
    yield ("none", False, True)


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Everything that the projections can launch."""
    for dtype, (activation, gated, rotary) in itertools.product(ITEM_SIZE, epilogues()):
        for aligned in SWITCHES:
            if _has_mma(dtype, capability):
                tail = _mma_tail(dtype, aligned, capability)
                yield LinearMma(dtype, activation, gated, rotary, *tail)
            for rows in FEW_ROWS if capability >= (7, 5) else ():
                tail = _few_tail(dtype, rows, aligned, capability)
                yield LinearFew(dtype, activation, gated, rotary, *tail)
                if not rotary:
                    yield MlpFew(dtype, activation, gated, *tail)
        if not rotary:
            yield LinearSimt(dtype, activation, gated)
    yield from map(RotaryEmbedding, ITEM_SIZE)
