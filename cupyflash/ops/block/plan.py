"""A stack of transformer blocks: its persistent kernel, and what calls of one signature share."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy

from ...runtime.array import Array, View
from ...runtime.config import ITEM_SIZE, KernelConfig
from ...runtime.gpu import architecture, capability_of, multiprocessors
from ...runtime.launch import Launch
from ...runtime.operation import Plan
from ...runtime.overlap import Written
from ...runtime.scratch import tile_counters
from ...runtime.structs import header

structs = header("block/decode_stack.cu")

CONSUMER_WARPS, MAX_WIDTH = structs.CONSUMER_WARPS, structs.MAX_WIDTH
MATRICES = len(structs.Matrix) - 1  # the last one is none
MAX_ROW_BYTES = structs.PIECE_STRIDE * structs.MAX_PIECES  # the longest row or segment of a row

HEAD_DIMS = (64, 128)  # other head dims are rounded up
MAX_HEAD_DIM = HEAD_DIMS[-1]

# KB of shared memory that a block may have: (the number of tiles that fill it, the bytes of one)
RINGS = {227: (5, 41600), 163: (5, 25600), 99: (4, 19200), 64: (3, 13824)}
OLDEST = (7, 5)  # compute capability
MAX_WORKSPACES = 32  # of the streams of a device


@dataclasses.dataclass(frozen=True)
class DecodeStack(KernelConfig):
    """All layers of a stack for one token of each sequence.

    Attributes:
        arch: 75: copies through registers; 80: asynchronous ones; 90: bulk copies.
        head_dim: the largest that it takes.
        sequences: at most, a power of two.
        tiles: of the ring of weights, ``tile_bytes`` each.
    """

    source: ClassVar[str] = "block/decode_stack.cu"
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


class StackShape(NamedTuple):
    """Sizes that the weights of a stack have; vocab and positions are 0 without a head."""

    dtype: str
    device: int
    layers: int
    width: int
    hidden: int
    heads: int
    eps: float
    vocab: int = 0
    positions: int = 0

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.width // self.heads


class StackPlan(Plan):
    """The kernel for one signature.

    Args:
        library: of the arrays.
        views: of k_cache, v_cache and lengths, and of x if that is where the stack begins.
        written: the names of the arrays that the call changes; lengths advance if they are there.

    Attributes:
        written: for the check of the addresses.
    """

    def __init__(
        self,
        function: str,
        library: Any,
        shape: StackShape,
        views: Mapping[str, View],
        written: tuple[str, ...],
    ) -> None:
        super().__init__(shape.device)
        self.library, batch = library, views["lengths"].shape[0]
        self.written = Written(function, views, written) if batch else Written(function, {}, ())
        self.empty = batch == 0
        if self.empty:
            return
        config, item = config_of(shape, batch), ITEM_SIZE[shape.dtype]
        sizes = shape.width, shape.hidden, shape.vocab or shape.width
        blocks = num_blocks(*sizes, multiprocessors(shape.device))
        splits = num_splits(batch, shape.heads, blocks)
        segments, segment = segments_of(shape.hidden, item)
        copies = structs.MAX_BATCH // config.sequences
        self.offsets, copy, self.workspace_bytes = _workspace(shape, batch, blocks, splits, copies)
        k_cache, v_cache = views["k_cache"], views["v_cache"]
        params = structs.DecodeStackParams(
            k_strides=_strides(k_cache),
            v_strides=_strides(v_cache),
            x_stride=views["x"].strides[0] if "x" in views else 0,
            copy_words=copy // 4,
            num_layers=shape.layers,
            batch=batch,
            width=shape.width,
            hidden_width=shape.hidden,
            segments=segments,
            segment=segment,
            heads=shape.heads,
            head_dim=shape.head_dim,
            max_length=k_cache.shape[-3],
            vocab=shape.vocab,
            positions=shape.positions,
            splits=splits,
            advance="lengths" in written,
            eps=shape.eps,
            scale_log2=math.log2(math.e) / math.sqrt(shape.head_dim),
            heads_inverse=inverse(shape.heads),
            head_dim_inverse=inverse(shape.head_dim),
            splits_inverse=inverse(splits),
        )
        self.launch = Launch(config, shape.device, blocks, params)
        self.counters = tile_counters(shape.device)
        self.workspaces: dict[int, Array] = {}  # keys: addresses of the counters of a stream

    def run(self, like: Array, pointers: tuple[int, ...]) -> None:
        """Launch with the pointers from x to position_embedding."""
        if self.empty:
            return
        stream = self.library.stream(self.device_id)
        barrier, own = self.counters.address(stream, self.library, like)
        # A graph owns the workspace of its launch; counters of a single call come with one as well.
        once = own is not None or self.counters.is_capturing(stream)
        workspace = None if once else self.workspaces.get(barrier)
        if workspace is None:
            workspace = self.library.zeros_int32(self.workspace_bytes // 4, like)
            if not once and len(self.workspaces) < MAX_WORKSPACES:
                self.workspaces[barrier] = workspace
        base = self.library.pointer(workspace)
        scratch = (base + offset for offset in self.offsets)
        self.launch.start(stream, self.launch.argument(*pointers, barrier, *scratch))


def pointer_table(library: Any, blocks: list[tuple[int, ...]], like: Array) -> Array:
    """The pointers of the weights of each block, on the device of ``like``."""
    table = (structs.BlockPointers * len(blocks))(
        *(structs.BlockPointers(*block) for block in blocks)
    )
    return library.put(numpy.frombuffer(bytes(table), "int64").copy(), like)


def _workspace(
    shape: StackShape, batch: int, blocks: int, splits: int, copies: int
) -> tuple[tuple[int, ...], int, int]:
    """The offsets of its parts, the bytes of one of the ``copies`` of the first three, and all."""
    copied = (  # residual to attended
        4 * batch * row_words(shape.width),
        4 * batch * row_words(shape.hidden),
        4 * batch * shape.heads * splits * (row_words(shape.head_dim) + 4),
    )
    *offsets, copy = _starts(copied)
    rest = (  # qkv to launches
        12 * batch * shape.width,
        4 * batch * shape.width,
        8 * blocks * structs.MAX_BATCH,
        4,
    )
    *of_rest, size = _starts(rest)
    return (*offsets, *(copies * copy + start for start in of_rest)), copy, copies * copy + size


def num_blocks(width: int, hidden: int, vocab: int, processors: int) -> int:
    """The number for which every block has rows of every matrix, see tagged_words.cuh."""
    return min(processors, width, hidden, vocab)


def num_splits(batch: int, heads: int, blocks: int) -> int:
    """The largest number of blocks that share the keys of a head.

    Each sequence has its part of the MAX_BATCH vectors of a product, one for each share of its
    keys; as many as keep the blocks busy.
    """
    most = structs.MAX_BATCH >> (batch - 1).bit_length()
    return min(range(1, most + 1), key=lambda splits: -(-batch * heads * splits // blocks) / splits)


def inverse(divisor: int) -> int:
    """The factor by which ``quotient`` in block/steps.cuh multiplies."""
    return -(-(2**31) // divisor)


def row_words(columns: int) -> int:
    """Words of a row of so many columns, as in tagged_words.cuh."""
    return -(-columns // 16) * 16


def segments_of(columns: int, item: int) -> tuple[int, int]:
    """(number, columns of one) of the equal segments of a row that is too long for registers."""
    number = -(-columns * item // MAX_ROW_BYTES)
    segment = -(-columns // number // 8) * 8
    return -(-columns // segment), segment


def config_of(shape: StackShape, batch: int) -> DecodeStack:
    """The kernel for a stack on its GPU."""
    return decode_stack(shape.dtype, shape.head_dim, batch, capability_of(shape.device))


def require_gpu(function: str, shape: StackShape) -> None:
    """NotImplementedError unless the GPU of the weights can run the kernel."""
    capability, width = capability_of(shape.device), shape.width
    if capability < OLDEST:
        least, got = (".".join(map(str, x)) for x in (OLDEST, capability))
        fact = f"the GPU must have compute capability {least} or newer, got {got}"
        raise NotImplementedError(f"{function}: {fact}")
    import cupy

    if not cupy.cuda.Device(shape.device).attributes["CooperativeLaunch"]:
        fact = "this GPU or its driver cannot launch cooperative kernels"
        raise NotImplementedError(f"{function}: {fact}")
    if config_of(shape, 1).tile_rows(width * ITEM_SIZE[shape.dtype]) < 2:
        fact = f"this GPU has too little shared memory for width {width}"
        raise NotImplementedError(f"{function}: {fact} in {shape.dtype}")


def _starts(sizes: tuple[int, ...]) -> list[int]:
    """The offsets of memory of these sizes, one after the other, and the end of the last one."""
    return [0, *itertools.accumulate(-(-size // 256) * 256 for size in sizes)]


def _strides(cache: View) -> structs.CacheStrides:
    """The strides of a cache of one layer or of several."""
    *layer, batch, row, head, _ = cache.strides
    return structs.CacheStrides(layer=layer[0] if layer else 0, batch=batch, row=row, head=head)
