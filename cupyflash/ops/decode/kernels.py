"""The steps of decoding beside projections: embedding, KV cache, attention to it, sampling."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import ClassVar

from ...runtime.config import ITEM_SIZE, KernelConfig, vector_width
from ...runtime.gpu import architecture
from ...runtime.scratch import COUNTERS
from ...runtime.structs import header

attention_structs = header("attention/params.cuh")
merge = header("decode/flash_decode_merge.cuh")

DECODE_WARPS, DECODE_ROWS = merge.NUM_WARPS, merge.ROWS  # warps and queries of a block
DECODE_KEYS = {64: 32, 128: 16, 192: 16, 256: 16}  # keys in a load of a warp, by head_dim
MAX_TOKENS = 8  # new ones of a sequence; more are work for the tiles of `attention`
MAX_CLUSTER = 8
# On an H200, clusters of four or eight use this part of the blocks that can run.
CLUSTERED = 10 / 11
LONG_BYTES = 768 << 10  # so many bytes of keys and values are long work for a block


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


class CacheAppend(RowsConfig):
    """Keys and values into a cache."""

    source: ClassVar[str] = "decode/cache_append.cu"
    threads: ClassVar[int] = header("decode/cache_append.cu").THREADS


@dataclasses.dataclass(frozen=True)
class FlashDecode(KernelConfig):
    """Attention of a few tokens to a cache; a block has some queries of a head of keys."""

    source: ClassVar[str] = "decode/flash_decode.cu"
    dependent: ClassVar[bool] = True
    cluster: ClassVar[int] = 1
    threads: ClassVar[int] = 32 * DECODE_WARPS

    dtype: str
    head_dim: int
    arch: int

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor runs at a time."""
        if self.head_dim > 192 and self.arch == 75:
            return 1  # it has 64 KB of shared memory
        return 3 if self.head_dim <= 128 else 2


@dataclasses.dataclass(frozen=True)
class FlashDecodeCluster(KernelConfig):
    """The same by clusters of blocks that share the keys."""

    source: ClassVar[str] = "decode/flash_decode_cluster.cu"
    dependent: ClassVar[bool] = True
    threads: ClassVar[int] = 32 * DECODE_WARPS

    dtype: str
    head_dim: int
    cluster: int


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


def decode_units(shape: attention_structs.AttentionShape) -> int:
    """Heads of keys with up to eight queries: blocks or clusters, or splits of them."""
    rows = shape.seqlen_q * (shape.heads_q // shape.heads_kv) if shape.heads_kv else 0
    return shape.batch * shape.heads_kv * -(-rows // DECODE_ROWS)


def part_size(head_dim: int) -> int:
    """Floats of DecodePart in flash_decode_merge.cuh."""
    return DECODE_ROWS * (head_dim + 2)


def flash_decode(
    dtype: str,
    shape: attention_structs.AttentionShape,
    capability: tuple[int, int],
    multiprocessors: int,
) -> FlashDecode | FlashDecodeCluster | None:
    """The kernel for new tokens and a cache of `shape`; None if another way is faster or needed.

    Blocks share the keys until every warp has a single load of them, or the GPU is full: clusters,
    as long as all of them run at once, or, where those would leave half of the GPU empty and the
    work is long, splits of blocks alone.
    """
    arch = _decode_arch(dtype, capability)
    if arch is None or shape.seqlen_q > MAX_TOKENS:
        return None
    head_dim, units, cluster = -(-shape.head_dim // 64) * 64, decode_units(shape), 1
    alone = FlashDecode(dtype, head_dim, arch)
    at_once = multiprocessors * alone.blocks
    while (
        arch == 90
        and cluster < MAX_CLUSTER
        and cluster * DECODE_WARPS <= _loads(shape, head_dim)
        and units * cluster < multiprocessors
        and (cluster == 1 or units * cluster * 2 <= at_once * CLUSTERED)
    ):
        cluster *= 2
    half_empty = units * cluster * 2 <= at_once
    if cluster == 1 or (half_empty and _is_long(alone, shape, at_once)):
        return alone
    return FlashDecodeCluster(dtype, head_dim, cluster)


def splits(
    config: FlashDecode | FlashDecodeCluster, shape: attention_structs.AttentionShape, at_once: int
) -> int:
    """The largest number of clusters, of which ``at_once`` can run, that share the keys of a cache.

    As many as run at once, or as pay: ``splits_of`` in flash_decode_merge.cuh knows the lengths.
    """
    units, loads = decode_units(shape), _loads(shape, config.head_dim)
    loads //= DECODE_WARPS * config.cluster
    if not 0 < units <= COUNTERS:
        return 1
    parts = max(1, min(at_once // units, loads, math.isqrt(9 * loads), merge.MAX_SPLITS))
    return parts if loads - -(-loads // parts) >= merge.SAVED_LOADS else 1


def _is_long(config: FlashDecode, shape: attention_structs.AttentionShape, at_once: int) -> bool:
    """True if splits fill the GPU, with long work for each."""
    parts = splits(config, shape, at_once)
    full = decode_units(shape) * (parts + 1) > at_once
    bytes_of_block = shape.seqlen_k // parts * config.head_dim * 4
    return parts > 1 and full and bytes_of_block >= LONG_BYTES


def _loads(shape: attention_structs.AttentionShape, head_dim: int) -> int:
    """The number of loads for the keys of a full cache, if one warp did all of them."""
    return -(-shape.seqlen_k // DECODE_KEYS[head_dim])


def _decode_arch(dtype: str, capability: tuple[int, int]) -> int | None:
    gpu = architecture(capability)
    return gpu.copies if dtype in gpu.mma_dtypes else None


def configurations(capability: tuple[int, int]) -> Iterator[KernelConfig]:
    for dtype, switch in itertools.product(ITEM_SIZE, (False, True)):
        yield Embedding(dtype, vector(dtype, switch))
        yield CacheAppend(dtype, vector(dtype, switch))
        yield Sample(dtype, switch)
    for dtype, head_dim in itertools.product(ITEM_SIZE, range(64, 257, 64)):
        arch = _decode_arch(dtype, capability)
        if arch is not None:
            yield FlashDecode(dtype, head_dim, arch)
        if arch == 90:
            yield from (FlashDecodeCluster(dtype, head_dim, cluster) for cluster in (2, 4, 8))
