"""Attention of the rows of a step with the pages of their sequences."""

import cupyflash
from cupyflash.ops.decode.cache_append import cache_append

from ...runtime.array import Array
from .batch import Batch

Window = tuple[int, int]


def packed_attention(
    q: Array, k: Array, v: Array, cu_seqlens: Array, longest: int, window: Window | None = None
) -> Array:
    """Attention of whole sequences, packed one behind another, without a cache.

    Args:
        cu_seqlens: int32 (batch + 1,), the first row of each sequence and the end of the last.
        longest: at least the rows of the longest sequence.
        window: as in `cached_attention`.
    """
    lengths = cu_seqlens, cu_seqlens, longest, longest
    return cupyflash.flash_attn_varlen_func(
        q, k, v, *lengths, causal=True, window_size=window or (-1, -1)
    )


def cached_attention(
    batch: Batch,
    caches: tuple[Array, Array],
    q: Array,
    k: Array,
    v: Array,
    window: Window | None = None,
) -> Array:
    """The attention of q (rows, heads, head_dim), like it; k and v enter the cache first.

    Where no sequence has keys before the step, those of the step are read where the projection has
    left them, in half the launches that keys in pages take.

    Args:
        caches: those of keys and of values of a layer, as `attention_with_cache` takes them.
        k, v: (rows, heads_kv, head_dim).
        window: the keys that are seen on each side of a query; None: all of those before it.
    """
    table, ends, longest = batch.page_table, batch.cu_seqlens, batch.max_new
    if batch.sequences is not None:
        cache_append(k, v, *caches, batch.row_positions, batch.sequences, page_table=table)
        return packed_attention(q, k, v, ends, longest, window)
    packed = ends is not None
    new = (q, k, v) if packed else tuple(x[:, None] for x in (q, k, v))
    out = cupyflash.attention_with_cache(
        *new, *caches, batch.positions, page_table=table, cu_seqlens_q=ends,
        max_seqlen_q=longest if packed else None, window=window, num_splits=batch.num_splits,
    )  # fmt: skip
    return out if packed else out[:, 0]
