"""Attention of new tokens to a cache of keys and values, which they enter: in one launch if few."""

from typing import NoReturn

from ...runtime.array import Array, ArrayT
from ..attention.foreign import refuse, refuses_foreign
from .operations import ATTENTION, plain

FUNCTION = "attention_with_cache"


@refuses_foreign
def attention_with_cache(
    q: ArrayT,
    k: Array | None,
    v: Array | None,
    k_cache: Array,
    v_cache: Array,
    positions: Array,
    *,
    page_table: Array | None = None,
    sequences: Array | None = None,
    cu_seqlens_q: Array | None = None,
    max_seqlen_q: int | None = None,
    causal: bool | str = True,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    leftpad: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    num_splits: int = 0,
    out: Array | None = None,
    return_lse: bool = False,
    **foreign: NoReturn,
) -> ArrayT | tuple[ArrayT, ArrayT]:
    """Put k and v into the cache, then attend from q to all that is in it; no gradients.

    The cache consists of pages of any size, or is contiguous. Lengths, tables and offsets are read
    on the GPU only, so the call can be part of a CUDA graph; with CuPy the graph needs a memory
    pool of its own. torch.compile takes the call as one operator.

    Args:
        q: (batch, seqlen, heads_q, head_dim), float16, bfloat16 or float32, head_dim from 1 to 256;
            or packed, (total, heads_q, head_dim) with ``cu_seqlens_q``. NumPy or CuPy arrays or
            torch tensors, strides are free but for the last.
        k: (batch, seqlen, heads_kv, head_dim) or (total, heads_kv, head_dim), dtype of q; heads_q a
            multiple of heads_kv. None together with v: the keys of the new tokens are in the cache
            already.
        v: like k.
        k_cache: (num_pages, page_size, heads_kv, head_dim), or without a table (batch, max_length,
            heads_kv, head_dim); dtype of q, or int8 or float8_e4m3fn with scales. Written, so it
            shares memory with no other argument.
        v_cache: like k_cache; with a table both may be views of one pool of pages.
        positions: int32 (batch,): token i of a sequence goes to key positions + i, what lies before
            it is its past.
        page_table: int32 (batch, max_pages): key j of sequence b is row ``j % page_size`` of page
            ``page_table[b, j // page_size]``. Entries without keys that a query sees are not read.
        sequences: int32 (batch,), instead of a table: sequence b lies in ``k_cache[sequences[b]]``.
        cu_seqlens_q: int32 (batch + 1,), the first row of each sequence and the end of the last.
        max_seqlen_q: of packed queries the longest sequence; None: it may have all of them.
        causal: query i of n sees the keys up to ``length - n + i``; False: all of its sequence.
        scale: of the scores; default ``1 / sqrt(head_dim)``.
        window: (left, right), the keys seen on each side of that key; None or -1 is unlimited.
        softcap, alibi_slopes, sinks: as in `cupyflash.attention`.
        leftpad: int32 (batch,), keys at the start of each sequence that nobody sees.
        k_scale, v_scale: float32, what multiplies a cache of 8 bits; broadcast to (num_pages,
            page_size, heads_kv). Those that have this very shape are computed for the new tokens,
            a head of a token each, and written; others divide what is written.
        num_splits: 1 to 128 divides the keys of every sequence into as many parts, so that a result
            depends on no other sequence of the batch; 0 divides them as is fastest.
        out: like q, where the result is written; it shares memory with no other argument.
        return_lse: return (out, lse), lse float32 (batch, heads_q, seqlen), packed (heads_q,
            total); natural logarithm.

    A query that sees no key gives 0 and an LSE of -inf. What lies on a GPU is not checked, as that
    would wait for it, unless CUPYFLASH_DEBUG=1: outside of the cache nothing is read or written,
    and the result of a sequence whose length or pages are not there means nothing. Where two new
    tokens go to one place, one of them is there afterwards.

    Returns:
        out like q.

    Raises:
        TypeError: dtypes, libraries, no number.
        ValueError: shapes, strides, devices, options, scales, memory that is shared; on the CPU a
            place that does not exist.
        NotImplementedError: inputs that require a gradient, or are within a transform of
            torch.func; a GPU, or a forced backend, that cannot compute this.

    Sources: Flash-Decoding, pytorch.org/blog/flash-decoding; pages: PagedAttention,
    arXiv:2309.06180.
    """
    if foreign:
        refuse(attention_with_cache, foreign)
    arrays = (
        q, k, v, k_cache, v_cache, positions, page_table, sequences, cu_seqlens_q, alibi_slopes,
        sinks, leftpad, k_scale, v_scale, out,
    )  # fmt: skip
    options = plain(
        FUNCTION, causal=causal, scale=scale, window=window, softcap=softcap,
        num_splits=num_splits, return_lse=return_lse, max_seqlen_q=max_seqlen_q,
    )  # fmt: skip
    out, lse = ATTENTION(FUNCTION, arrays, options)
    return (out, lse) if options[0].return_lse else out
