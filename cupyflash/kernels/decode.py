"""The steps of decoding beside attention and projections: embedding, KV cache, sampling."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from ..decode_params import CacheAppendParams, EmbeddingParams, SampleParams
from ..kernel_config import ITEM_SIZE, KernelConfig
from .norm import vector_width

THREADS = 256
SAMPLE_THREADS = 1024


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


class CacheAppend(RowsConfig):
    """Keys and values into a cache."""

    source: ClassVar[str] = "decode/cache_append.cu"
    params: ClassVar[type[CacheAppendParams]] = CacheAppendParams


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


def configurations(capability: tuple[int, int]) -> Iterator[KernelConfig]:
    """Everything that can be launched."""
    for dtype, switch in itertools.product(ITEM_SIZE, (False, True)):
        yield Embedding(dtype, vector(dtype, switch))
        yield CacheAppend(dtype, vector(dtype, switch))
        yield Sample(dtype, switch)
