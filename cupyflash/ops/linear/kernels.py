"""The kernels of projections for GPUs of any kind, and which configuration a problem takes.

`small_m` is for small M (up to 32 rows), `many` for any M. Those for Hopper
alone are in `sm90_kernels` and `small_m_sm90_kernels`; `launches` chooses between all of them.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ...runtime.config import ITEM_SIZE, KernelConfig, vector_width
from ...runtime.gpu import Capability, architecture
from ...runtime.structs import header

structs = header("linear/params.cuh")
small_m_rows = header("linear/small_m_rows.cuh")
head_norm = header("linear/head_norm.cu")
linear_mma = header("linear/linear_mma.cu")
linear_simt = header("linear/linear_simt.cu")

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu")
SWITCHES = (False, True)

SMALL_M_ROWS = (8, 16, 32)  # rows of x in the tiles of linear_small_m
SMALL_M_STAGES = (4, 3, 2, 1)  # slices of weights of a warp in shared memory
MMA_STAGE_BYTES = 16384  # x and weights in shared memory, as linear_mma.cu asserts
GATE_LOADS = 2


@dataclasses.dataclass(frozen=True)
class LinearConfig(KernelConfig):
    """A kernel that computes a projection; a subclass adds the parameters of its tile.

    Attributes:
        gated: activation(gate) * up of two weights, instead of activation of one.
        rotary: whether q and k are rotated.
    """

    dtype: str
    activation: str
    gated: bool
    rotary: bool


@dataclasses.dataclass(frozen=True)
class LinearSmallM(LinearConfig):
    """A projection of up to ``rows`` rows.

    Attributes:
        vector: elements of a weight in a load.
        num_stages: slices of weights that a warp has room for.
        arch: 80, or 75 for tensor cores as those of Turing.
    """

    source: ClassVar[str] = "linear/linear_small_m.cu"
    dependent: ClassVar[bool] = True
    threads: ClassVar[int] = small_m_rows.SMALL_M_THREADS

    rows: int
    vector: int
    num_stages: int
    arch: int
    smem_bytes: int

    def grid(self, rows: int, columns: int, multiprocessors: int) -> int:
        pairs = columns if self.gated else -(-columns // 2)
        return min(pairs, multiprocessors)


@dataclasses.dataclass(frozen=True)
class LinearMma(LinearConfig):
    """Any number of rows on mma.sync; ``vector`` and ``arch`` are those of `LinearSmallM`."""

    source: ClassVar[str] = "linear/linear_mma.cu"
    block: ClassVar[int] = linear_mma.BLOCK  # rows and columns of a tile; half the columns if gated
    threads: ClassVar[int] = linear_mma.THREADS

    vector: int
    num_stages: int
    arch: int
    smem_bytes: int

    def grid(self, rows: int, columns: int, multiprocessors: int) -> int:
        block_columns = self.block // 2 if self.gated else self.block
        return -(-rows // self.block) * -(-columns // block_columns)


@dataclasses.dataclass(frozen=True)
class LinearSimt(KernelConfig):
    """Any number of rows without tensor cores."""

    source: ClassVar[str] = "linear/linear_simt.cu"
    rotary: ClassVar[bool] = False
    block: ClassVar[int] = linear_simt.BLOCK  # rows and columns of a tile
    threads: ClassVar[int] = linear_simt.SIMT_THREADS

    dtype: str
    activation: str
    gated: bool

    def grid(self, rows: int, columns: int, multiprocessors: int) -> int:
        return -(-rows // self.block) * -(-columns // self.block)


@dataclasses.dataclass(frozen=True)
class RotaryEmbedding(KernelConfig):
    """Rotates q and k in place, after a projection that does not do it itself; a pair a thread."""

    source: ClassVar[str] = "linear/rotary_embedding.cu"
    threads: ClassVar[int] = header("linear/rotary_embedding.cu").THREADS

    dtype: str

    def grid(self, rows: int, rotary: structs.Rotary) -> int:
        pairs = rows * (rotary.columns // rotary.head_dim) * (rotary.rotary_dim // 2)
        return -(-pairs // self.threads)


@dataclasses.dataclass(frozen=True)
class HeadNorm(KernelConfig):
    """Normalises and rotates the heads of q and k in place; a warp has a head of a row."""

    source: ClassVar[str] = "linear/head_norm.cu"
    threads: ClassVar[int] = head_norm.THREADS
    dependent: ClassVar[bool] = True
    max_head_dim: ClassVar[int] = head_norm.MAX_HEAD_DIM

    dtype: str

    def grid(self, rows: int, heads: int) -> int:
        """Number of blocks for this many heads of each row."""
        return -(-rows * heads // (self.threads // 32))


@dataclasses.dataclass(frozen=True)
class GateFwd(KernelConfig):
    """activation(gate) * up; a thread has ``loads`` packs of ``vector`` elements."""

    source: ClassVar[str] = "linear/gate_fwd.cu"
    threads: ClassVar[int] = header("linear/gate_fwd.cu").THREADS

    dtype: str
    activation: str
    loads: int
    vector: int

    def grid(self, size: int) -> int:
        """Number of blocks for this many elements."""
        return -(-size // (self.threads * self.loads * self.vector))


class GateBwd(GateFwd):
    """Its gradients."""

    source: ClassVar[str] = "linear/gate_bwd.cu"
    threads: ClassVar[int] = header("linear/gate_bwd.cu").THREADS


def gate(backward: bool, dtype: str, activation: str, aligned: bool) -> GateFwd:
    """The kernel; ``aligned`` if addresses and lengths of arrays are multiples of 16 bytes."""
    kind = GateBwd if backward else GateFwd
    return kind(dtype, activation, GATE_LOADS, vector_width(dtype) if aligned else 1)


def row_bytes(dtype: str, depth: int) -> int:
    """The bytes of a row of x in shared memory, as in small_m_rows.cuh."""
    return -(-depth * ITEM_SIZE[dtype] // small_m_rows.SLICE_BYTES) * small_m_rows.SLICE_BYTES + 64


def small_m(
    dtype: str,
    activation: str,
    gated: bool,
    rotary: bool,
    rows: int,
    depth: int,
    aligned: bool,
    capability: Capability,
) -> LinearSmallM | None:
    """The kernel for small M; None if M is not small, or x has no room in shared memory."""
    for tail in _small_m_tails(dtype, rows, aligned, capability):
        config = LinearSmallM(dtype, activation, gated, rotary, *tail)
        if _fits(config, rows * row_bytes(dtype, depth)):
            return config
    return None


def many(
    dtype: str,
    activation: str,
    gated: bool,
    rotary: bool,
    aligned: bool,
    capability: Capability,
    backend: str | None,
) -> LinearMma | LinearSimt:
    """The kernel for any number of rows."""
    if backend == "simt" or dtype not in architecture(capability).mma_dtypes:
        return LinearSimt(dtype, activation, gated)
    return LinearMma(dtype, activation, gated, rotary, *_mma_tail(dtype, aligned, capability))


def _small_m_tails(
    dtype: str, rows: int, aligned: bool, capability: Capability
) -> Iterator[tuple[int, int, int, int, int]]:
    """(rows, vector, num_stages, arch, smem_bytes), the fastest first."""
    gpu = architecture(capability)
    # Without copies of 16 bytes, and on Turing, more rows would spill.
    most = SMALL_M_ROWS[-1] if aligned and gpu.copies >= 80 else small_m_rows.MAX_SUM_ROWS
    if rows > most or capability < (7, 5):
        return
    tile = next(tile for tile in SMALL_M_ROWS if rows <= tile)
    vector = vector_width(dtype) if aligned else 1
    # Copies through registers are waited for at once, so that one stage is enough for them.
    ring = vector > 1 and gpu.mma >= 80
    for stages in SMALL_M_STAGES if ring else SMALL_M_STAGES[-1:]:
        if ring and stages == 1 and rows > small_m_rows.MAX_SUM_ROWS:
            return  # a kernel for many rows is faster then
        yield tile, vector, stages, gpu.mma, 1024 * gpu.shared_memory


def _fits(config: LinearSmallM, bytes_of_rows: int) -> bool:
    """Whether shared memory has room for rows besides what the kernel needs."""
    floats = (
        small_m_rows.SMALL_M_WARPS
        * min(config.rows, small_m_rows.MAX_SUM_ROWS)
        * small_m_rows.SUMS_PITCH
        + 2 * config.rows
    )
    rings = small_m_rows.SMALL_M_WARPS * config.num_stages * small_m_rows.STAGE_BYTES
    return rings + 4 * floats + bytes_of_rows <= config.smem_bytes


def _mma_tail(dtype: str, aligned: bool, capability: Capability) -> tuple[int, int, int, int]:
    """(vector, num_stages, arch, smem_bytes)."""
    gpu = architecture(capability)
    stages = 4 if gpu.copies >= 80 else 2
    return vector_width(dtype) if aligned else 1, stages, gpu.mma, stages * MMA_STAGE_BYTES


def epilogues() -> Iterator[tuple[str, bool, bool]]:
    """(activation, gated, rotary) of every projection."""
    yield from ((activation, False, False) for activation in ACTIVATIONS)
    yield from ((activation, True, False) for activation in ACTIVATIONS)
    yield ("none", False, True)


def configurations(capability: Capability) -> Iterator[KernelConfig]:
    """Everything that these functions can return."""
    for dtype, (activation, gated, rotary) in itertools.product(ITEM_SIZE, epilogues()):
        for aligned in SWITCHES:
            if dtype in architecture(capability).mma_dtypes:
                tail = _mma_tail(dtype, aligned, capability)
                yield LinearMma(dtype, activation, gated, rotary, *tail)
            for rows in SMALL_M_ROWS:
                for tail in _small_m_tails(dtype, rows, aligned, capability):
                    config = LinearSmallM(dtype, activation, gated, rotary, *tail)
                    if _fits(config, 0):
                        yield config
        if not rotary:
            yield LinearSimt(dtype, activation, gated)
    yield from map(RotaryEmbedding, ITEM_SIZE)
    yield from map(HeadNorm, ITEM_SIZE)
    for kind in itertools.product(SWITCHES, ITEM_SIZE, ACTIVATIONS, SWITCHES):
        yield gate(*kind)
