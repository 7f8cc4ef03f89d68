"""The launch before all others of a pass whose kernels skip what the mask of a text hides.

It evaluates the mask once for each of its elements and leaves two bits for each tile of the main
kernel, and a bit for each score of partial tiles (``cuda_src/attention/text/tile_bits.cuh``).
"""

import dataclasses
import struct
from typing import Any, ClassVar

from ...runtime.array import Array
from ...runtime.config import KernelConfig
from ...runtime.launch import pointer_of
from ...runtime.structs import header
from .kernels import AttentionKernel, AttentionLaunch
from .options import NO_EXTRAS
from .problem import Problem
from .score_text.tiles import FoundTiles

structs = header("attention/text/mask_tiles.cu")
pack_bits = struct.Struct("QQiiii32x").pack  # MaskTileBits of tile_bits.cuh
PLACES_BYTES = 2**27  # at most, of the bits of partial tiles; the scores of 32768 x 32768
WORD_TILES, FRAGMENT_ROWS, LANES = 32, 16, 32
LENGTHS = [
    NO_EXTRAS._fields.index(x) for x in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
]
NO_LENGTHS = (0,) * len(LENGTHS)


@dataclasses.dataclass(frozen=True)
class MaskTilesKernel(AttentionKernel):
    """A block finds the bits of 32 tiles.

    Attributes:
        by_keys: the tiles of a row have the same keys, else the same queries.
        rows_are_keys, columns: of a `Fragment` of the main kernel.
    """

    source: ClassVar[str] = "attention/text/mask_tiles.cu"

    block_m: int
    block_n: int
    by_keys: bool
    rows_are_keys: bool
    columns: int
    num_warps: int = 8

    @property
    def place_words(self) -> int:
        """Words of 32 bits for the scores of a tile: each lane has as many in a fragment."""
        words = -(-self.columns // 64)
        fragments = self.block_m * self.block_n // (FRAGMENT_ROWS * self.columns)
        return fragments * words * LANES


class MaskTilesLaunch:
    """Finds the bits of the mask of one problem, for the tiles of a kernel."""

    def __init__(self, problem: Problem, main: KernelConfig) -> None:
        shape, by_keys = problem.shape, main.tiles_of == "k"
        config = MaskTilesKernel(
            main.block_m, main.block_n, by_keys, *main.fragment, text=problem.text
        )
        tiles = (-(-shape.seqlen_q // main.block_m), -(-shape.seqlen_k // main.block_n))
        rows, columns = reversed(tiles) if by_keys else tiles
        words = -(-columns // WORD_TILES)
        all_words, place_words = shape.batch * rows * words, config.place_words
        places = min(columns, WORD_TILES, PLACES_BYTES // (4 * place_words * all_words))
        self.bits_bytes = 4 * 2 * all_words
        self.size = 2 * all_words + all_words * places * place_words
        self.key = (config, problem.device, shape.batch, shape.seqlen_q, shape.seqlen_k)
        self.rest = (rows * words, words, places, place_words)
        params = structs.MaskTilesParams(shape=shape, rows=rows, words=words, word_places=places)
        self.launch = AttentionLaunch(config, problem, params, all_words)

    def __call__(
        self,
        library: Any,
        stream: Any,
        like: Array,
        extras: list[int],
        captures: bytes,
        found: FoundTiles | None,
    ) -> tuple[Array, bytes]:
        """Writes the bits, unless they are ``found``.

        Returns:
            Their memory, which the caller holds until the last launch that reads it, and what the
            kernels get in front of the captures.
        """
        at = pointer_of(stream)
        if found is not None and (bits := found.get(self.key, at)):
            return bits
        memory = library.empty_float32((self.size,), like)
        address = library.pointer(memory)
        places = address + self.bits_bytes
        lengths = [extras[x] for x in LENGTHS] if extras else NO_LENGTHS
        argument = self.launch.argument(address, places, *lengths)
        self.launch.start(stream, self.launch.with_captures(argument, captures))
        bits = memory, pack_bits(address, places, *self.rest)
        if found is not None:
            found.put(self.key, at, bits)
        return bits
