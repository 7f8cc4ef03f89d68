"""The steps of decoding beside projections: embedding, KV cache, attention to it, sampling."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ...runtime.config import ITEM_SIZE, KernelConfig, vector_width
from ...runtime.gpu import architecture
from ...runtime.structs import header
from .cached import CachedShape

work = header("decode/decode_work.cuh")

CACHE_KINDS = ("", "int8", "float8_e4m3fn")  # dtypes, as narrow.cuh numbers them; "" is that of k
NARROW_KINDS = (1, 2)  # those of 8 bits
MAX_ROWS = 16  # queries that one unit takes
TILE_ROWS = 64  # queries of a unit of flash_decode_tile
TILE_HEAD_DIMS = (64, 128)  # of its tiles
BESIDE = 2048  # bytes of shared memory that a block of it takes beside its tiles
ONE_HEADS = 32  # of keys, of which FlashDecodeOne splits each alike and leaves few blocks over
MAX_TOKENS = 8  # new ones of a sequence; more are work for the tiles of `attention`
DECODE_ROWS = {64: (8, 16), 128: (8, 16), 192: (8,), 256: (8,)}  # by head_dim of the tiles
MOST_BLOCKS = 512  # of a grid that shares the keys
FEW_LEFT_OVER = 0.04  # of the blocks of such a grid, which have no work
DECODE_COUNTERS = 2 * MOST_BLOCKS  # of a launch; as many parts


@dataclasses.dataclass(frozen=True)
class RowsConfig(KernelConfig):
    """An elementwise kernel of rows; ``vector`` elements of a thread, all of one row."""

    dtype: str
    vector: int

    def grid(self, size: int) -> int:
        """Blocks for ``size`` elements."""
        return -(-size // (self.threads * self.vector))


class Embedding(RowsConfig):
    """Rows of tables."""

    source: ClassVar[str] = "decode/embedding.cu"
    threads: ClassVar[int] = header("decode/embedding.cu").THREADS
    dependent: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class CacheRows(KernelConfig):
    """A kernel of rows of a cache; ``vector`` columns of a load.

    Attributes:
        kind: of the cache, an index into `CACHE_KINDS`.
    """

    dtype: str
    kind: int
    vector: int

    @property
    def is_usual(self) -> bool:
        return super().is_usual and not self.kind


class CacheAppend(CacheRows):
    """Keys and values into a cache; a warp has a head of a row."""

    source: ClassVar[str] = "decode/cache_append.cu"
    dependent: ClassVar[bool] = True
    threads: ClassVar[int] = header("decode/cache_append.cu").THREADS


class CacheGather(CacheRows):
    """Keys and values out of a cache; a thread has ``vector`` columns at a time."""

    source: ClassVar[str] = "decode/cache_gather.cu"
    threads: ClassVar[int] = header("decode/cache_gather.cu").THREADS

    def blocks(self, length: int, heads: int, head_dim: int) -> int:
        """Blocks for so many keys of a sequence."""
        items = length * heads * -(-head_dim // self.vector)
        return -(-items // header(self.source).ITEMS)


@dataclasses.dataclass(frozen=True)
class FlashDecode(KernelConfig):
    """Attention of a few tokens to a cache; ``rows`` queries meet the keys of a head at once."""

    source: ClassVar[str] = "decode/flash_decode.cu"
    dependent: ClassVar[bool] = True
    threads: ClassVar[int] = work.DECODE_THREADS
    appends: ClassVar[bool] = True  # new keys may be arguments

    dtype: str
    head_dim: int
    rows: int
    arch: int

    @property
    def keys(self) -> int:
        """Keys in a load of a warp."""
        return 32 if self.head_dim == 64 else 16

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor runs at a time."""
        if self.head_dim > 192 and self.arch == 75:
            return 1  # it has 64 KB of shared memory
        return 3 if self.head_dim <= 128 and self.rows == 8 else 2

    @property
    def part_size(self) -> int:
        """Floats of DecodePart in flash_decode_merge.cuh."""
        return self.rows * (self.head_dim + 2)


class FlashDecodeOne(FlashDecode):
    """The same for one sequence with up to ``rows`` queries of a head of keys."""

    source: ClassVar[str] = "decode/flash_decode_one.cu"


@dataclasses.dataclass(frozen=True)
class FlashDecodeNarrow(FlashDecode):
    """The same with a cache of 8 bits.

    Attributes:
        kind: of the cache, an index into `CACHE_KINDS`.
    """

    source: ClassVar[str] = "decode/flash_decode_narrow.cu"
    appends: ClassVar[bool] = False

    kind: int

    @property
    def is_usual(self) -> bool:
        return False

    @property
    def keys(self) -> int:
        """Keys in a load of a warp."""
        return 32


class FlashDecodeNarrowOne(FlashDecodeNarrow):
    """The same for one sequence, as `FlashDecodeOne`."""

    source: ClassVar[str] = "decode/flash_decode_narrow_one.cu"


@dataclasses.dataclass(frozen=True)
class FlashDecodeTile(KernelConfig):
    """Attention of more new tokens to a cache; 64 queries meet the keys of a head at once.

    Attributes:
        stages: tiles of keys in shared memory.
        blocks: those that a multiprocessor runs at a time.
    """

    source: ClassVar[str] = "decode/flash_decode_tile.cu"
    dependent: ClassVar[bool] = True
    threads: ClassVar[int] = work.DECODE_THREADS
    appends: ClassVar[bool] = False
    rows: ClassVar[int] = TILE_ROWS
    keys: ClassVar[int] = 16

    dtype: str
    head_dim: int
    arch: int
    stages: int
    smem_bytes: int
    blocks: int = dataclasses.field(kw_only=True)

    @property
    def part_size(self) -> int:
        """Floats of DecodePart in flash_decode_merge.cuh."""
        return self.rows * (self.head_dim + 2)


@dataclasses.dataclass(frozen=True)
class Sample(KernelConfig):
    """Tokens from logits; a block has a row."""

    source: ClassVar[str] = "decode/sample.cu"
    threads: ClassVar[int] = header("decode/sample.cu").BLOCK

    dtype: str
    greedy: bool


def vector(dtype: str, aligned: bool) -> int:
    """Elements of a load."""
    return vector_width(dtype) if aligned else 1


def flash_decode(
    dtype: str, kind: int, shape: CachedShape, num_splits: int, capability: tuple[int, int]
) -> FlashDecode | FlashDecodeTile | None:
    """The kernel for new tokens and a cache; None if another way is faster or needed.

    Args:
        kind: of the cache, an index into `CACHE_KINDS`.
        num_splits: what the caller asks for; 0 leaves it to the plan.
    """
    arch, rows = _decode_arch(dtype, capability), decode_rows(shape)
    head_dim = -(-shape.head_dim // 64) * 64
    if arch is None:
        return None
    few = shape.seqlen_q <= MAX_TOKENS
    if rows > MAX_ROWS and (few or rows <= TILE_ROWS) and not kind:
        config = flash_decode_tile(dtype, head_dim, capability)
        if config is not None:
            return config
    if not few and rows > MAX_ROWS:
        return None
    fitting = [x for x in DECODE_ROWS[head_dim] if x >= rows] or DECODE_ROWS[head_dim][-1:]
    few_units = shape.batch == 1 and rows <= fitting[0] and shape.heads_kv <= ONE_HEADS
    one = few_units and not num_splits
    if kind:
        narrow = FlashDecodeNarrowOne if one else FlashDecodeNarrow
        return narrow(dtype, head_dim, fitting[0], arch, kind)
    return (FlashDecodeOne if one else FlashDecode)(dtype, head_dim, fitting[0], arch)


def flash_decode_tile(
    dtype: str, head_dim: int, capability: tuple[int, int]
) -> FlashDecodeTile | None:
    """The kernel for more queries; None if there is none of this head_dim, or for this GPU."""
    arch, kib = _decode_arch(dtype, capability), architecture(capability).shared_memory
    if head_dim not in TILE_HEAD_DIMS or arch is None or arch < 80:
        return None

    def size(stages: int) -> int:
        """Bytes of the queries and of tiles of keys and values."""
        return 2 * head_dim * (TILE_ROWS + 2 * stages * TILE_ROWS)

    stages = 3 if size(3) + BESIDE <= 1024 * kib else 2
    blocks = 2 if 2 * (size(stages) + BESIDE) <= 1024 * (kib + 1) else 1
    return FlashDecodeTile(dtype, head_dim, arch, stages, size(stages), blocks=blocks)


def decode_rows(shape: CachedShape) -> int:
    """Queries of a head of keys, in the longest sequence."""
    return shape.seqlen_q * (shape.heads_q // shape.heads_kv) if shape.heads_kv else 0


def decode_units(config: FlashDecode | FlashDecodeTile, shape: CachedShape) -> int:
    """Heads of keys with up to ``config.rows`` queries, if all sequences are as the longest."""
    return shape.batch * shape.heads_kv * -(-decode_rows(shape) // config.rows)


def decode_rounds(config: FlashDecode | FlashDecodeTile, shape: CachedShape) -> int:
    """The most rounds of all units (decode_work.cuh)."""
    keys = config.keys * work.NUM_WARPS
    return decode_units(config, shape) * (-(-shape.max_length // keys) + 1)


def decode_grid(
    config: FlashDecode | FlashDecodeTile, shape: CachedShape, num_splits: int, multiprocessors: int
) -> int:
    """The number of blocks: those that run at once and can have work, or one a split of a unit."""
    if num_splits:
        return decode_units(config, shape) * num_splits
    at_once = min(config.blocks * multiprocessors, MOST_BLOCKS)
    return min(at_once, decode_rounds(config, shape))


def heads_abreast(heads_kv: int, grid: int) -> int:
    """Blocks of a team that shares keys: the most heads that leave few of the blocks over."""
    fitting = (x for x in range(1, heads_kv + 1) if heads_kv % x == 0 and x <= grid)
    return max(x for x in fitting if grid % x <= FEW_LEFT_OVER * grid)


def _decode_arch(dtype: str, capability: tuple[int, int]) -> int | None:
    gpu = architecture(capability)
    return gpu.copies if dtype in gpu.mma_dtypes else None


def configurations(capability: tuple[int, int]) -> Iterator[KernelConfig]:
    for dtype, switch in itertools.product(ITEM_SIZE, (False, True)):
        yield Embedding(dtype, vector(dtype, switch))
        for kind in range(len(CACHE_KINDS)):
            yield CacheAppend(dtype, kind, vector(dtype, switch))
            yield CacheGather(dtype, kind, vector(dtype, switch))
        yield Sample(dtype, switch)
    for dtype, head_dim in itertools.product(ITEM_SIZE, range(64, 257, 64)):
        arch = _decode_arch(dtype, capability)
        if arch is not None:
            for rows in DECODE_ROWS[head_dim]:
                yield FlashDecode(dtype, head_dim, rows, arch)
                yield FlashDecodeOne(dtype, head_dim, rows, arch)
                for kind in NARROW_KINDS:
                    yield FlashDecodeNarrow(dtype, head_dim, rows, arch, kind)
                    yield FlashDecodeNarrowOne(dtype, head_dim, rows, arch, kind)
            if (config := flash_decode_tile(dtype, head_dim, capability)) is not None:
                yield config
