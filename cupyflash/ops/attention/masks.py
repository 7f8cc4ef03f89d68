"""The launches before all others of a pass whose kernels read a mask in a form of their own.

A kernel that takes a key mask gets the address of a record in the place of the bias. The record
holds the address of the bias and a bit for each key (``cuda_src/attention/mask_record.cuh``).

A kernel that skips what the mask of a text hides gets two bits for each of its tiles, and a bit for
each score of partial tiles (``cuda_src/attention/text/tile_bits.cuh``): the mask is evaluated once
for each of its elements. A second launch sorts the rows of tiles by their work.
"""

import ctypes
import dataclasses
import struct
from typing import Any, ClassVar

from ...runtime.array import Array
from ...runtime.config import KernelConfig
from ...runtime.launch import Launch, pointer_of
from ...runtime.structs import header
from .kernels import AttentionKernel, AttentionLaunch, structs
from .options import BIAS, KEY_MASK, NO_EXTRAS, SEQUSED_K
from .problem import Problem
from .score_text.tiles import FoundTiles

record_structs = header("attention/mask_record.cu")
tile_structs = header("attention/text/mask_tiles.cu")
order_structs = header("attention/text/mask_order.cu")
pack_bits = struct.Struct("QQiiiiQi20x").pack  # MaskTileBits of tile_bits.cuh
PLACES_BYTES = 2**27  # at most, of the bits of partial tiles; the scores of 32768 x 32768
WORD_TILES, FRAGMENT_ROWS, LANES = 32, 16, 32
LENGTHS = [
    NO_EXTRAS._fields.index(x) for x in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
]
NO_LENGTHS = (0,) * len(LENGTHS)


@dataclasses.dataclass(frozen=True)
class MaskRecord(AttentionKernel):
    """Forward and backward, first, where there is a key mask: packs it to bits."""

    source: ClassVar[str] = "attention/mask_record.cu"

    num_warps: int = 8

    def grid(self, shape: structs.AttentionShape) -> int:
        return shape.batch


class KeyMaskLaunch:
    """Packs the key mask of one problem.

    Args:
        trim: whether the kernels may take the keys up to the last seen one for the whole sequence.
    """

    def __init__(self, problem: Problem, trim: bool = False) -> None:
        shape, mask = problem.shape, problem.extras.key_mask
        keys = shape.seqlen_k + record_structs.MASK_PADDING
        words = -(-keys // 128) * 4
        self.trim = trim
        self.lengths_offset = ctypes.sizeof(record_structs.MaskRecord) + 4 * words * shape.batch
        self.size = self.lengths_offset // 4 + shape.batch
        params = record_structs.MaskRecordParams(
            batch_stride=mask.strides[0],
            key_stride=mask.strides[1],
            words=words,
            seqlen_k=shape.seqlen_k,
            trim=trim,
        )
        config = MaskRecord()
        self.launch = Launch(config, problem.device, config.grid(shape), params)

    def __call__(
        self, library: Any, stream: Any, like: Array, extras: list[int]
    ) -> tuple[Array, int]:
        """Writes the record, and puts it into the pointers of `Extras` where the kernels read it.

        Returns:
            The memory of the record, which the caller holds until the last launch that reads it,
            and the address of the bias, for its tensor map.
        """
        memory = library.empty_float32((self.size,), like)
        record = library.pointer(memory)
        mask, bias = extras[KEY_MASK], extras[BIAS]
        if not mask:  # the mask is a bool bias
            mask, bias = bias, 0
        lengths = record + self.lengths_offset
        self.launch.start(stream, self.launch.argument(mask, bias, record, lengths))
        extras[BIAS] = record
        if self.trim:
            extras[SEQUSED_K] = lengths
        return memory, bias


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


@dataclasses.dataclass(frozen=True)
class MaskOrderKernel(AttentionKernel):
    """A block sorts the rows of tiles of a sequence; ``by_keys`` as in `MaskTilesKernel`."""

    source: ClassVar[str] = "attention/text/mask_order.cu"

    by_keys: bool
    num_warps: int = 32


def finder_of(main: KernelConfig) -> MaskTilesKernel:
    """The kernel that finds the bits of the tiles of another, which has a text."""
    by_keys = main.tiles_of == "k"
    return MaskTilesKernel(main.block_m, main.block_n, by_keys, *main.fragment, text=main.text)


class MaskTilesLaunch:
    """Finds the bits of the mask of one problem, for the tiles of a kernel.

    Those of the first sequence serve all, where these share the mask.
    """

    def __init__(self, problem: Problem, main: KernelConfig) -> None:
        shape, config = problem.shape, finder_of(main)
        tiles = (-(-shape.seqlen_q // main.block_m), -(-shape.seqlen_k // main.block_n))
        rows, columns = reversed(tiles) if config.by_keys else tiles
        words = -(-columns // WORD_TILES)
        sequences = 1 if problem.mask_is_shared else shape.batch
        all_words, place_words = sequences * rows * words, config.place_words
        places = min(columns, WORD_TILES, PLACES_BYTES // (4 * place_words * all_words))
        self.bits_bytes = 4 * 2 * all_words
        self.order_at = self.bits_bytes + 4 * all_words * places * place_words
        all_rows = 0 if problem.has_own_lengths else sequences * rows
        self.order_bytes = 4 * all_rows
        self.size = self.order_at // 4 + 2 * all_rows
        self.key = (config, problem.device, shape.batch, shape.seqlen_q, shape.seqlen_k)
        batch_words, self.batch_rows = (rows * words, rows) if sequences > 1 else (0, 0)
        self.rest = (batch_words, words, places, place_words)
        params = tile_structs.MaskTilesParams(
            shape=shape, rows=rows, words=words, word_places=places
        )
        self.launch = AttentionLaunch(config, problem, params, all_words)
        self.sort = None
        if all_rows:
            order = order_structs.MaskOrderParams(rows=rows, words=words)
            self.sort = Launch(MaskOrderKernel(config.by_keys), problem.device, sequences, order)

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
        order = 0
        if self.sort:
            order = address + self.order_at
            work = order + self.order_bytes
            self.sort.start(stream, self.sort.argument(address, work, order))
        bits = memory, pack_bits(address, places, *self.rest, order, self.batch_rows)
        if found is not None:
            found.put(self.key, at, bits)
        return bits
