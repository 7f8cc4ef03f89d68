"""The launch of a kernel of the backend ``sm90``: a block for each multiprocessor.

Its argument begins with tensor maps and ends with that of a bias; between them is the address of a
counter of tiles. In front of them is what it must know of pages, if keys lie in some. Where
sequences have lengths of their own, a small kernel runs before it. Blocks that share the keys of a
tile are followed by a kernel that combines what they have found.
"""

import ctypes
import math
import operator
import struct
from typing import Any

from ....runtime.config import ITEM_SIZE, KernelConfig
from ....runtime.gpu import Card
from ....runtime.launch import call_fields, dependent_launches
from ....runtime.scratch import NULL, tile_counters
from ....runtime.structs import header
from ....runtime.tensor_map import BOX_COLUMNS, TensorMaps, TensorMapSpec
from .. import sharing
from ..kernels import AttentionLaunch
from ..problem import Problem
from .kernels import MAPS_OF_PAGES, SEQUENCE_MAPS, pages, shared_columns

structs = header("attention/params.cuh")

pack_two = struct.Struct("2Q").pack
pack_four = struct.Struct("4Q").pack
NO_SEQUENCES = pack_two(0, 0)
NO_MAP = bytes(ctypes.sizeof(structs.TensorMap))


class PersistentLaunch(AttentionLaunch):
    """Tensor maps in front of the pointers, usually at hand; a block for each multiprocessor.

    Args:
        splits: blocks that share the keys of a tile.
    """

    def __init__(
        self,
        config: KernelConfig,
        problem: Problem,
        params: ctypes.Structure,
        card: Card,
        splits: int = 1,
    ) -> None:
        tiles = num_tiles(config, problem, params.shape.group_shares) * splits
        blocks = min(tiles, card.multiprocessors)
        super().__init__(config, problem, params, blocks)
        names = call_fields(params)
        self.mapped = operator.itemgetter(*(names.index(name) for name in config.boxes))
        columns = min(BOX_COLUMNS, shared_columns(config.head_dim))
        boxes = config.boxes
        self.pages = b""
        if problem.pages is not None:
            rows = box_of_pages(config.block_n, problem.pages)
            boxes |= {"k": rows, "v": rows}
            self.pages = _behind_v(problem, params.v_strides.row, rows)
            self.captures_end = ctypes.sizeof(pages.PagesOfKeys)
        self.maps = TensorMaps(
            [
                tensor_map(problem, name, getattr(params, f"{name}_strides"), rows, columns)
                for name, rows in boxes.items()
            ],
            problem.device,
        )
        self.bias_maps = None
        if config.bias_box_rows:
            self.bias_maps = TensorMaps([bias_map(problem, config.bias_box_rows)], problem.device)
        # The counter is null where every block has one tile, as blocks that share its keys do.
        self.counters = tile_counters(problem.device) if tiles > blocks else _no_counter
        self.end = _after_counter(config.params, num_splits=1)
        self.sequences = None
        if problem.has_own_lengths:
            self.sequences = OwnLengths(config, problem, params)
            self.workspace_size = self.sequences.workspace_size
        # The bytes behind the pointers of `plain_argument`, if all calls have the same ones.
        alike = self.counters is _no_counter and splits == 1
        self.constant = self._behind(None) if alike else None

    def argument(
        self, *pointers: int, stream: Any = None, workspace: int = 0, bias: int = 0
    ) -> bytes:
        """The argument, after the launch of the kernel that makes the maps of sequences, if any."""
        mapped = self.mapped(pointers)
        maps = self.maps[mapped]
        if self.pages:  # whose table takes the place of a bias
            maps = pack_two(bias, mapped[2]) + self.pages + maps
        base = self.pack(*pointers) + self.tail
        packed = NO_SEQUENCES
        if self.sequences:
            packed = self.sequences(stream, maps, pointers, workspace)
        bias_map = NO_MAP if self.bias_maps is None else self.bias_maps[(bias,)]
        return maps + base + packed + self.rest(stream, workspace) + bias_map

    def plain_argument(self, packed: bytes, pointers: tuple[int, ...], stream: Any) -> bytes:
        maps = self.maps[self.mapped(pointers)]
        return maps + packed + (self.constant or self._behind(stream))

    def _behind(self, stream: Any) -> bytes:
        return self.tail + NO_SEQUENCES + self.rest(stream, 0) + NO_MAP

    def rest(self, stream: Any, workspace: int) -> bytes:
        """``tile_counter`` and what follows it in the argument, up to the map of the bias."""
        return self.counters(stream) + self.end


class OwnLengths:
    """The kernel before a persistent one: a tensor map for each sequence, and the list of tiles."""

    def __init__(self, config: KernelConfig, problem: Problem, params: ctypes.Structure) -> None:
        maps = SEQUENCE_MAPS if problem.pages is None else MAPS_OF_PAGES
        self.launch = AttentionLaunch(maps, problem, params)
        names = call_fields(params)
        lengths = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
        self.lengths = operator.itemgetter(*map(names.index, lengths))
        self.maps_size = len(config.boxes) * problem.shape.batch * ctypes.sizeof(structs.TensorMap)
        max_tiles = sharing.tiles_of_head(config, problem)
        list_size = (1 + max_tiles) * ctypes.sizeof(structs.PackedTile)
        self.workspace_size = (self.maps_size + list_size) // 4
        rest = structs.SequenceMapsParams(
            shape=params.shape,
            max_tiles=max_tiles,
            tile_rows=config.tile_rows,
            tiles_of_keys=config.tiles_of == "k",
        )
        self.rest = bytes(rest)[structs.SequenceMapsParams.shape.offset :]

    def __call__(self, stream: Any, maps: bytes, pointers: tuple, workspace: int) -> bytes:
        """The pointers ``sequence_maps`` and ``packed_tiles`` for the kernel that follows."""
        made = pack_two(workspace, workspace + self.maps_size)
        self.launch.start(stream, maps + pack_four(*self.lengths(pointers)) + made + self.rest)
        return made


class SplitLaunch(PersistentLaunch):
    """A forward whose tiles are too few for the multiprocessors: ``splits`` blocks share each."""

    def __init__(
        self,
        config: KernelConfig,
        problem: Problem,
        params: ctypes.Structure,
        card: Card,
        splits: int,
        combine: KernelConfig,
    ) -> None:
        super().__init__(config, problem, params, card, splits)
        self.combine = AttentionLaunch(combine, problem, params)
        rows = math.prod(problem.lse_shape)
        self.out_offset = -(-4 * self.workspace_size // 16) * 16
        self.sums_offset = self.out_offset + 4 * splits * rows * config.head_dim_v
        self.workspace_size = self.sums_offset // 4 + 2 * splits * rows
        self.end = _after_counter(config.params, partial_rows=rows, num_splits=splits)
        self.end = self.end[len(NO_SEQUENCES) :]

    def rest(self, stream: Any, workspace: int) -> bytes:
        """No counter: every block has one tile. Then the two places for partial results."""
        partial = pack_two(workspace + self.out_offset, workspace + self.sums_offset)
        return NULL + partial + self.end

    def start(self, stream: Any, params: bytes) -> None:
        super().start(stream, params)
        with dependent_launches():  # it reads what the kernel before it has left, and no more
            self.combine.start(stream, self.without_captures(params))


def box_of_pages(block_n: int, rows: Any) -> int:
    """Rows of a box of keys, of which a tile has ``block_n``: it lies within a page.

    Args:
        rows: the `PagedRows`.
    """
    if rows.capacity <= rows.page_size:  # the only one of its sequence
        return block_n
    return math.gcd(block_n, rows.page_size)


def _behind_v(problem: Problem, row_step: int, box_rows: int) -> bytes:
    """The bytes of `PagesOfKeys` behind its two pointers."""
    found = pages.PagesOfKeys(
        rows=problem.pages, v_row_bytes=row_step * ITEM_SIZE[problem.dtype], box_rows=box_rows
    )
    return bytes(found)[pages.PagesOfKeys.rows.offset :]


def num_tiles(config: KernelConfig, problem: Problem, shares: int) -> int:
    """Tiles of a kernel; where a block takes whole heads, each head (or share) of a sequence."""
    if getattr(config, "whole_heads", False):
        return problem.shape.heads_kv * shares * problem.shape.batch
    return sharing.num_tiles(config, problem, shares)


def _after_counter(params: type[ctypes.Structure], **values: int) -> bytes:
    """Between ``tile_counter`` and the map of the bias; backward kernels have nothing there."""
    names = [name for name, _ in params._fields_]
    argument = params(**{name: value for name, value in values.items() if name in names})
    return bytes(argument)[params.tile_counter.offset + len(NULL) : params.bias_map.offset]


def _no_counter(stream: Any) -> bytes:
    return NULL


def tensor_map(
    problem: Problem,
    name: str,
    strides: structs.Strides,
    box_rows: int,
    columns: int = BOX_COLUMNS,
) -> TensorMapSpec:
    """The map of a tensor of a problem whose access allows it; packed, a batch of one."""
    batch, rows, heads = sizes = problem.sizes(name)
    # `Problem.access` does not look at the stride of an axis with one index, nor at those of a
    # tensor without elements. The driver wants them valid all the same, as that of a row is.
    head_dim = problem.head_dims[name not in ("q", "k")]
    steps = (n if size > 1 and rows else head_dim for size, n in zip(sizes, strides))
    batch_step, row_step, head_step = (step * ITEM_SIZE[problem.dtype] for step in steps)
    # The driver refuses an empty dimension; the kernels load nothing of an empty tensor.
    dims = (head_dim, max(1, rows), heads, batch)
    return TensorMapSpec(problem.dtype, dims, (row_step, head_step, batch_step), box_rows, columns)


def bias_map(problem: Problem, box_rows: int) -> TensorMapSpec:
    """The map of the bias, of length 1 in the axes that it is broadcast on."""
    shape, item = problem.shape, ITEM_SIZE[problem.dtype]
    batch_step, head_step, row_step, _ = (step * item for step in problem.bias_strides)
    heads = shape.heads_q if head_step else 1
    batch = shape.batch if batch_step else 1
    dims = (max(1, shape.seqlen_k), shape.seqlen_q, heads, batch)  # none may be empty
    # The stride of an axis with one index does not matter, but it must be valid.
    strides = (row_step, head_step or row_step, batch_step or row_step)
    return TensorMapSpec(problem.dtype, dims, strides, box_rows)
