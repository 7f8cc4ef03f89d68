"""Kernels of attention, ready to be launched: everything but the pointers of a call is prepared.

`PersistentLaunch` is a kernel of sm_90, with tensor maps in front of its argument and one of a bias
at its end, a counter of tiles, and a small kernel before it where sequences have lengths of their
own. `SplitLaunch` shares the keys of a tile out over blocks and adds a kernel that combines what
they have found.
"""

import ctypes
import itertools
import math
import operator
import struct
from typing import Any

from ..runtime.config import ITEM_SIZE, KernelConfig
from ..runtime.gpu import capability_of, l2_bytes, multiprocessors
from ..runtime.launch import Launch, call_fields, pointer_of
from ..runtime.scratch import NULL, tile_counters
from ..runtime.structs import header
from ..runtime.tensor_map import BOX_COLUMNS, TensorMaps, TensorMapSpec
from .backends.sm90 import MAX_SPLITS, SEQUENCE_MAPS, shared_columns
from .problem import Problem

structs = header("attention/params.cuh")
split_structs = header("attention/fp16x3_params.cuh")

MIN_SPLIT_KEYS = 256  # of a block: two or more key tiles of any head dim
# A launch of fewer tiles than these for each multiprocessor has few, and then a section of heads
# should have so many.
FEW_TILES, SECTION_TILES = 8, 3
# Taking whole heads saves each query the time of so many keys. It costs a part of the time of all
# keys: that in which multiprocessors wait for the last heads, and the second number, as no other
# block reads the same q and dout at the same time. The cost should be less.
SAVED_KEYS, LONELY = 64, 0.05
# The part of the L2 cache that q, dout and a dq in float32 of these heads may take, and the part of
# that which they need under a causal mask, where they are read half as often.
HEADS_L2_FRACTION, CAUSAL_L2 = 0.7, 0.6
# Blocks walk up if each multiprocessor has more tiles than this number divided by the head dim; the
# second one is for head dims above 192.
UP_COLUMNS, UP_COLUMNS_WIDE = 400, 2048
# A block should have at least so many query rows. With fewer, the sums of dK and dV that it leaves
# in float32 take longer than it saves.
MIN_SHARE_ROWS = 1024
pack_two = struct.Struct("2Q").pack
pack_four = struct.Struct("4Q").pack
pack_seven = struct.Struct("7Q").pack
NO_SEQUENCES = pack_two(0, 0)
NO_MAP = bytes(ctypes.sizeof(structs.TensorMap))


def prepare(config: KernelConfig, problem: Problem, params: ctypes.Structure) -> "Launch":
    """The launch of a configuration."""
    if config.split_inputs:
        return SplitInputsLaunch(config, problem, params)
    if not config.persistent:
        return _launch(config, problem, params)
    splits = num_splits(config, problem)
    if splits > 1:
        return SplitLaunch(config, problem, params, splits)
    return PersistentLaunch(config, problem, params, splits)


def _launch(config: KernelConfig, problem: Problem, params: ctypes.Structure) -> Launch:
    return Launch(config, problem.device, config.grid(problem.shape), params)


class PersistentLaunch(Launch):
    """Tensor maps in front of the pointers, usually at hand; a block for each multiprocessor."""

    def __init__(
        self, config: KernelConfig, problem: Problem, params: ctypes.Structure, splits: int
    ) -> None:
        blocks = num_blocks(config, problem, splits)
        super().__init__(config, problem.device, blocks, params)
        names = call_fields(params)
        self.mapped = operator.itemgetter(*(names.index(name) for name in config.boxes))
        columns = min(BOX_COLUMNS, shared_columns(config.head_dim))
        self.maps = TensorMaps(
            [
                tensor_map(problem, name, getattr(params, f"{name}_strides"), rows, columns)
                for name, rows in config.boxes.items()
            ],
            problem.device,
        )
        self.bias, self.bias_maps = names.index("bias"), None
        if config.bias_box_rows:
            self.bias_maps = TensorMaps([bias_map(problem, config.bias_box_rows)], problem.device)
        # Null where every block has one tile, as those that share its keys do.
        several = num_tiles(config, problem) * splits > blocks
        self.counters = tile_counters(problem.device) if several else _no_counter
        self.end = _after_counter(config.params, num_splits=1)
        self.sequences = None
        if problem.has_own_lengths:
            self.sequences = OwnLengths(config, problem, params)
            self.workspace_size = self.sequences.workspace_size

    def argument(
        self, *pointers: int, stream: Any, workspace: int = 0, mapped_bias: int = 0
    ) -> bytes:
        """The argument, after the launch of the kernel that makes the maps of sequences, if any.

        Args:
            mapped_bias: the address of the bias if ``pointers`` has that of a key mask.
        """
        maps = self.maps[self.mapped(pointers)]
        base = self.pack(*pointers) + self.tail
        packed = NO_SEQUENCES
        if self.sequences:
            packed = self.sequences(stream, maps, pointers, workspace)
        bias = NO_MAP
        if self.bias_maps is not None:
            bias = self.bias_maps[(mapped_bias or pointers[self.bias],)]
        return maps + base + packed + self.rest(stream, workspace) + bias

    def rest(self, stream: Any, workspace: int) -> bytes:
        """``tile_counter`` and what follows it in the argument, up to the map of the bias."""
        return self.counters(stream) + self.end


class OwnLengths:
    """The kernel before a persistent one: a tensor map for each sequence, and the list of tiles."""

    def __init__(self, config: KernelConfig, problem: Problem, params: ctypes.Structure) -> None:
        self.launch = _launch(SEQUENCE_MAPS, problem, params)
        names = call_fields(params)
        lengths = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
        self.lengths = operator.itemgetter(*map(names.index, lengths))
        self.maps_size = len(config.boxes) * problem.shape.batch * ctypes.sizeof(structs.TensorMap)
        max_tiles = _tiles_of_head(config, problem)
        list_size = (1 + max_tiles) * ctypes.sizeof(structs.PackedTile)
        self.workspace_size = (self.maps_size + list_size) // 4
        rest = structs.SequenceMapsParams(
            shape=problem.shape,
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
        self, config: KernelConfig, problem: Problem, params: ctypes.Structure, splits: int
    ) -> None:
        super().__init__(config.split_keys(), problem, params, splits)
        self.combine = _launch(config.combine, problem, params)
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
        self.combine.start(stream, params)


class SplitInputsLaunch(Launch):
    """A kernel that reads float16 parts: after those that make them in a workspace, and before
    those that end the pass.
    """

    def __init__(self, config: KernelConfig, problem: Problem, params: ctypes.Structure) -> None:
        shape, names = problem.shape, call_fields(params)
        super().__init__(config, problem.device, config.grid(shape), params)
        self.after = [_launch(x, problem, params) for x in config.after]
        is_backward = "dout" in names
        strides = {
            x: getattr(params, x)
            for x, _ in split_structs.Fp16x3SplitParams._fields_
            if x.endswith("_strides") and hasattr(params, x)
        }
        splitting = split_structs.Fp16x3SplitParams(
            **strides,
            accum_rows=params.accum_rows if is_backward else 0,
            shape=shape,
        )
        self.before = [
            Launch(x, problem.device, x.grid(shape, is_backward), splitting) for x in config.before
        ]
        fields = call_fields(splitting)
        self.inputs = [names.index(name) if name in names else None for name in fields]
        start = len(NULL) * len(fields)
        self.splitting = bytes(splitting)[start : type(splitting).split.offset]
        rows_q = math.prod(problem.sizes("q")[:2])
        rows_k = math.prod(problem.sizes("k")[:2])
        self.rows = pack_two(rows_q, rows_k)
        self.lengths_size = 16 * -(-shape.batch // 4)
        self.ranges_size = shape.batch * shape.heads_kv * ctypes.sizeof(split_structs.HeadRange)
        width = 2 * config.parts * config.head_dim
        size_q, size_k = rows_q * shape.heads_q * width, rows_k * shape.heads_kv * width
        sizes = (self.ranges_size, size_q, size_k, size_k, size_q if is_backward else 0)
        sizes += (self.lengths_size, self.lengths_size)
        *self.offsets, end = itertools.accumulate(sizes, initial=0)
        capability = capability_of(problem.device)
        # The kernels for CUDA cores compute the sequences that cannot be split. The others have no
        # rows for them.
        self.fallback = [_launch(x, problem, params) for x in config.fallback(capability)]
        self.params, self.semaphores_size = config.params, 0
        if is_backward:
            self.semaphores_size = 4 * (1 + shape.heads_q * params.accum_rows // 16)
        self.workspace_size = end // 4

    def argument(self, *pointers: int, stream: Any, workspace: int = 0) -> bytes:
        """The argument, after the launches of the kernels that make the parts."""
        import cupy

        cupy.cuda.runtime.memsetAsync(workspace, 0, self.ranges_size, pointer_of(stream))
        parts = [workspace + offset for offset in self.offsets]
        split = pack_seven(*parts) + self.rows
        inputs = [0 if x is None else pointers[x] for x in self.inputs]
        for launch in self.before:
            launch.start(stream, launch.pack(*inputs) + self.splitting + split)
        return self.pack(*pointers) + self.tail + split

    def start(self, stream: Any, params: bytes) -> None:
        """Launches the kernel, those that end the pass, and those for what cannot be split."""
        import cupy

        super().start(stream, params)
        for launch in self.after:
            launch.start(stream, params)
        argument = self.params.from_buffer_copy(params)
        base, left = argument.base, argument.split
        if self.semaphores_size and base.dq_semaphore:
            # Tickets start from 0 again; so do the flags, as tiles have other sizes now.
            cupy.cuda.runtime.memsetAsync(
                base.dq_semaphore, 0, self.semaphores_size, pointer_of(stream)
            )
        base.seqused_q, base.seqused_k = left.left_q, left.left_k
        for launch in self.fallback:
            launch.start(stream, bytes(base))


def num_splits(config: KernelConfig, problem: Problem) -> int:
    """How many blocks should share the keys of a tile: 1 unless most of the GPU would idle."""
    if config.combine is None:
        return 1
    idle = multiprocessors(problem.device) // max(1, num_tiles(config, problem))
    return max(1, min(idle, problem.shape.seqlen_k // MIN_SPLIT_KEYS, MAX_SPLITS))


def group_shares(config: KernelConfig, problem: Problem, deterministic: bool = False) -> int:
    """How many blocks should divide the work of a key head in the backward pass.

    One, unless the tiles of keys are too few for the multiprocessors. Then so many that each
    multiprocessor gets about five, as long as each block has a query head; under a mask, where the
    longest tiles come first, two heads if that leaves each multiprocessor about two tiles. If one
    head for each block still leaves multiprocessors idle, blocks of some kernels divide the rows of
    a query head as well.
    """
    shape, at_once = problem.shape, multiprocessors(problem.device)
    shape.group_shares = 1
    tiles = num_tiles(config, problem)
    group = shape.heads_q // shape.heads_kv
    if tiles >= 3 * at_once:
        return 1
    heads_of_a_share = max(1, group * tiles // (5 * at_once))
    if group * tiles > 3.8 * at_once and problem.features.masked:
        heads_of_a_share = max(2, heads_of_a_share)
    shares = -(-group // heads_of_a_share)
    parts = min(at_once // max(1, shares * tiles), shape.seqlen_q // MIN_SHARE_ROWS)
    if shares < group or parts < 2 or not config.divides_rows:
        return shares
    # Blocks that take turns must find each query tile in the same share of all key tiles, which is
    # not so under a mask.
    return shares if deterministic and problem.features.masked else shares * parts


def least_side_by_side(config: KernelConfig, problem: Problem) -> int:
    """How many heads of tile_order.cuh the backward pass should have side by side at least.

    Where a multiprocessor has few tiles, the last section must not end with a long tile in each
    head, which weighs more than queries that miss the L2 cache.
    """
    shape, at_once = problem.shape, multiprocessors(problem.device)
    heads, tiles = shape.heads_kv * shape.group_shares * shape.batch, num_tiles(config, problem)
    if tiles > FEW_TILES * at_once:
        return 1
    return min(heads, -(-SECTION_TILES * at_once * heads // max(1, tiles)))


def takes_heads(config: KernelConfig, problem: Problem) -> bool:
    """Whether each block of the backward pass should take all keys of a head.

    Then dq_accum is neither cleared before the main kernel nor converted after it. But the launch
    ends with whole heads, and the rows of as many of them as there are multiprocessors should fit
    the L2 cache, unless there is one tile of keys. Every query must see the first key.
    """
    shape, at_once = problem.shape, multiprocessors(problem.device)
    diagonal = 0 if shape.top_left else shape.seqlen_k - shape.seqlen_q
    sees_first = -shape.window_right <= diagonal <= shape.window_left - shape.seqlen_q + 1
    group = shape.heads_q // shape.heads_kv
    if config.taking_heads() == config or problem.has_own_lengths or not sees_first:
        return False
    if shape.seqlen_k <= config.tile_rows:
        return True
    if shape.group_shares > group and problem.features.masked:
        return False  # blocks divide the rows of a head, otherwise in each key tile
    heads = shape.heads_kv * shape.group_shares * shape.batch
    rows = -(-group // shape.group_shares) * shape.seqlen_q
    row_bytes = shape.head_dim * (ITEM_SIZE[problem.dtype] * 2 + 4)
    keys, needed = shape.seqlen_k, rows * row_bytes * at_once
    if problem.is_causal:
        keys, needed = keys / 2, needed * CAUSAL_L2
    idle = -heads % at_once / heads
    fits = needed < HEADS_L2_FRACTION * l2_bytes(problem.device)
    return fits and (idle + LONELY) * keys < SAVED_KEYS


def walks_up(config: KernelConfig, problem: Problem) -> bool:
    """Whether blocks that add in turns should walk from the first query to the last.

    Under a causal mask they then wait less for each other, but each launch ends with its longest
    tiles, which a launch of few tiles cannot afford. With several query heads in each block, they
    would be at different ones, which do not fit the L2 cache.
    """
    shape = problem.shape
    if config.walking_up() == config or not problem.is_causal:
        return False
    few = UP_COLUMNS if config.head_dim <= 192 else UP_COLUMNS_WIDE
    columns = num_tiles(config, problem) * config.head_dim
    many = columns > few * multiprocessors(problem.device)
    return many and shape.heads_q <= shape.heads_kv * shape.group_shares


def num_blocks(config: KernelConfig, problem: Problem, splits: int = 1) -> int:
    """Blocks of a persistent kernel."""
    return min(num_tiles(config, problem) * splits, multiprocessors(problem.device))


def num_tiles(config: KernelConfig, problem: Problem) -> int:
    """Tiles of a kernel; where sequences have lengths of their own, at most.

    Where a block takes whole heads, each head (or share) of a sequence is one tile.
    """
    shape, of_keys = problem.shape, config.tiles_of == "k"
    heads = shape.heads_kv * shape.group_shares if of_keys else shape.heads_q
    return heads * (shape.batch if config.whole_heads else _tiles_of_head(config, problem))


def _tiles_of_head(config: KernelConfig, problem: Problem) -> int:
    """Returns the tiles of one head in all sequences together, an upper bound."""
    of_keys, shape = config.tiles_of == "k", problem.shape
    rows = problem.total_k if of_keys else problem.total_q
    if rows is None:
        return -(-(shape.seqlen_k if of_keys else shape.seqlen_q) // config.tile_rows) * shape.batch
    return rows // config.tile_rows + shape.batch


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
    # The stride of an axis with one index does not matter, nor any of a tensor without elements
    # (`Problem.access` does not look at them), but they must be valid: that of a row.
    head_dim = problem.head_dims[name not in ("q", "k")]
    steps = (n if size > 1 and rows else head_dim for size, n in zip(sizes, strides))
    batch_step, row_step, head_step = (step * ITEM_SIZE[problem.dtype] for step in steps)
    # No dimension may be empty; of an empty tensor nothing is loaded.
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
