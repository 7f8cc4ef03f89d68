"""The persistent kernel of a stack of transformer blocks: its shared memory on each GPU."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ..runtime.config import ITEM_SIZE, KernelConfig
from ..runtime.gpu import architecture
from ..runtime.structs import header

structs = header("decode/decode_stack.cu")

CONSUMER_WARPS, MAX_WIDTH = structs.CONSUMER_WARPS, structs.MAX_WIDTH
MATRICES = len(structs.Matrix) - 1  # the last one is none
MAX_ROW_BYTES = structs.PIECE_STRIDE * structs.MAX_PIECES  # of a row, or of a segment of it

HEAD_DIMS = (64, 128)  # other head dims are rounded up
MAX_HEAD_DIM = HEAD_DIMS[-1]

# Tiles and bytes of one, by the KB of shared memory that a block may have: what fills them.
RINGS = {227: (5, 41600), 163: (5, 25600), 99: (4, 19200), 64: (3, 13824)}
OLDEST = (7, 5)  # compute capability


@dataclasses.dataclass(frozen=True)
class DecodeStack(KernelConfig):
    """All layers of a stack for one token of each sequence.

    Attributes:
        arch: 75: copies through registers; 80: asynchronous ones; 90: bulk copies.
        head_dim: the largest that it takes.
        sequences: at most, a power of two.
        tiles: of the ring of weights, ``tile_bytes`` each.
    """

    source: ClassVar[str] = "decode/decode_stack.cu"
    params: ClassVar[type[structs.DecodeStackParams]] = structs.DecodeStackParams
    cooperative: ClassVar[bool] = True
    threads: ClassVar[int] = 32 * (CONSUMER_WARPS + 1)  # consumers, and who fills the ring

    dtype: str
    arch: int
    head_dim: int
    sequences: int
    tiles: int
    tile_bytes: int
    smem_bytes: int

    def tile_rows(self, row_bytes: int) -> int:
        """Rows of this size that fit into a tile."""
        return self.tile_bytes // row_pitch(row_bytes)


def decode_stack(dtype: str, head_dim: int, batch: int, capability: tuple[int, int]) -> DecodeStack:
    """The kernel for heads of at most ``head_dim`` and ``batch`` sequences."""
    head_dim = next(size for size in HEAD_DIMS if head_dim <= size)
    sequences = 1 << (batch - 1).bit_length()
    gpu = architecture(capability)
    arch = gpu.copies
    tiles, tile_bytes = RINGS[gpu.shared_memory]
    smem_bytes = shared_memory(arch, head_dim, tiles, tile_bytes)
    return DecodeStack(dtype, arch, head_dim, sequences, tiles, tile_bytes, smem_bytes)


def configurations(capability: tuple[int, int]) -> Iterator[KernelConfig]:
    """Everything that `decode_stack` can return."""
    if capability < OLDEST:
        return
    for dtype, head_dim, sequences in itertools.product(ITEM_SIZE, HEAD_DIMS, (1, 2, 4, 8)):
        yield decode_stack(dtype, head_dim, sequences, capability)


def row_pitch(row_bytes: int) -> int:
    """Bytes from row to row in a tile."""
    return (row_bytes + 63) // 128 * 128 + 64


def shared_memory(arch: int, head_dim: int, tiles: int, tile_bytes: int) -> int:
    """The size of ``DecodeStorage``."""
    barriers = 16 * tiles if arch >= 90 else 4 + 4 * CONSUMER_WARPS
    ring = _round_up(tiles * tile_bytes + barriers)
    products = 4 * CONSUMER_WARPS * structs.GROUP_ROWS * structs.MAX_BATCH
    moments = max(16 * CONSUMER_WARPS * structs.MAX_BATCH, 3 * 4 * head_dim)  # or a new token
    pointers = structs.MAX_LAYERS * 8 * len(structs.BlockPointers._fields_)
    rows = 16 * MATRICES
    return _round_up(ring + pointers + rows + products + moments + 2 * 4 * structs.MAX_BATCH)


def _round_up(size: int) -> int:
    return -(-size // 128) * 128
