"""The steps of decoding beside projections: embedding, KV cache, attention to it, sampling."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ..attention.params import AttentionShape
from ..kernel_config import ITEM_SIZE, KernelConfig
from ..norm.row_configs import vector_width
from .params import CacheAppendParams, EmbeddingParams, FlashDecodeParams, SampleParams

THREADS = 256
SAMPLE_THREADS = 1024

# As in decode_step.cuh.
DECODE_WARPS = 4
DECODE_ROWS = 8  # queries of a block
MAX_TOKENS = 8  # new ones of a sequence; more are work for the tiles of `attention`
MAX_CLUSTER = 8
MAX_BLOCK_BYTES = 2**20  # keys and values of a block, if there are too few for the bandwidth


@dataclasses.dataclass(frozen=True)
class RowsConfig(KernelConfig):
    """An elementwise kernel of rows; ``vector`` elements of a thread, all of one row."""

    dtype: str
    vector: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS

    def grid(self, size: int) -> int:
        """Blocks for ``size`` elements."""
        return -(-size // (THREADS * self.vector))


class Embedding(RowsConfig):
    """Rows of tables."""

    source: ClassVar[str] = "decode/embedding.cu"
    params: ClassVar[type[EmbeddingParams]] = EmbeddingParams
    dependent: ClassVar[bool] = True


class CacheAppend(RowsConfig):
    """Keys and values into a cache."""

    source: ClassVar[str] = "decode/cache_append.cu"
    params: ClassVar[type[CacheAppendParams]] = CacheAppendParams


@dataclasses.dataclass(frozen=True)
class FlashDecode(KernelConfig):
    """Attention of a few tokens to a cache; a block has some queries of a head of keys."""

    source: ClassVar[str] = "attention/flash_decode.cu"
    params: ClassVar[type[FlashDecodeParams]] = FlashDecodeParams
    dependent: ClassVar[bool] = True
    blocks_of_unit: ClassVar[int] = 1

    dtype: str
    head_dim: int
    arch: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * DECODE_WARPS


@dataclasses.dataclass(frozen=True)
class FlashDecodeSm90(KernelConfig):
    """The same by clusters of blocks that share the keys."""

    source: ClassVar[str] = "attention/flash_decode_sm90.cu"
    params: ClassVar[type[FlashDecodeParams]] = FlashDecodeParams
    dependent: ClassVar[bool] = True

    dtype: str
    head_dim: int
    cluster: int

    @property
    def blocks_of_unit(self) -> int:
        """Blocks for the same queries."""
        return self.cluster

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * DECODE_WARPS


@dataclasses.dataclass(frozen=True)
class Sample(KernelConfig):
    """Tokens from logits; a block has a row."""

    source: ClassVar[str] = "decode/sample.cu"
    params: ClassVar[type[SampleParams]] = SampleParams

    dtype: str
    greedy: bool

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return SAMPLE_THREADS


def vector(dtype: str, aligned: bool) -> int:
    """Elements of a load."""
    return vector_width(dtype) if aligned else 1


def decode_units(shape: AttentionShape) -> int:
    """Blocks, or clusters of them."""
    rows = shape.seqlen_q * (shape.heads_q // shape.heads_kv) if shape.heads_kv else 0
    return shape.batch * shape.heads_kv * -(-rows // DECODE_ROWS)


def flash_decode(
    dtype: str, shape: AttentionShape, capability: tuple[int, int], multiprocessors: int
) -> FlashDecode | FlashDecodeSm90 | None:
    """The kernel for new tokens and a cache of `shape`; None if another way is faster, or the only.

    Blocks share the keys until every warp has a single load of them, or the GPU is full.
    """
    arch = _decode_arch(dtype, capability)
    if arch is None or shape.seqlen_q > MAX_TOKENS:
        return None
    head_dim, units, cluster = -(-shape.head_dim // 64) * 64, decode_units(shape), 1
    loads = -(-shape.seqlen_k // (32 if head_dim == 64 else 16)) + 1
    while (
        arch == 90
        and cluster < MAX_CLUSTER
        and cluster * DECODE_WARPS < loads
        and units * cluster < multiprocessors
    ):
        cluster *= 2
    block_bytes = 4 * shape.head_dim * shape.seqlen_k // cluster
    if units and units * cluster < multiprocessors // 3 and block_bytes > MAX_BLOCK_BYTES:
        return None
    if cluster > 1:
        return FlashDecodeSm90(dtype, head_dim, cluster)
    return FlashDecode(dtype, head_dim, arch)


def _decode_arch(dtype: str, capability: tuple[int, int]) -> int | None:
    if dtype == "float32" or capability < (7, 5) or (dtype == "bfloat16" and capability < (8, 0)):
        return None
    return 75 if capability < (8, 0) else 80 if capability < (9, 0) else 90


def configurations(capability: tuple[int, int]) -> Iterator[KernelConfig]:
    """Everything that can be launched."""
    for dtype, switch in itertools.product(ITEM_SIZE, (False, True)):
        yield Embedding(dtype, vector(dtype, switch))
        yield CacheAppend(dtype, vector(dtype, switch))
        yield Sample(dtype, switch)
    for dtype, head_dim in itertools.product(ITEM_SIZE, range(64, 257, 64)):
        arch = _decode_arch(dtype, capability)
        if arch is not None:
            yield FlashDecode(dtype, head_dim, arch)
        if arch == 90:
            yield from (FlashDecodeSm90(dtype, head_dim, cluster) for cluster in (2, 4, 8))
