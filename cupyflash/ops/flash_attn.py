"""The names, signatures and meaning of flash-attn 2.8, so that a change of import is enough.

Layout (batch, seqlen, heads, head_dim), or (total, heads, head_dim) for packed sequences;
``causal`` is aligned bottom-right. ``return_attn_probs=True`` returns (out, softmax_lse, None),
both differentiable: the probabilities themselves exist nowhere.

What flash-attn 2.8 does not have is keyword-only: ``sinks`` as in `cupyflash.attention`, and of
packed sequences ``seqused_q`` and ``seqused_k`` as in flash-attn 3, ``score`` and ``mask``.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from ..runtime.array import Array
from ..runtime.checks import plain_flag
from .attention.flash_attn_calls import Lengths, call, unpack
from .attention.foreign import refuse, refuses_foreign
from .flash_attn_paged import paged_varlen

if TYPE_CHECKING:
    from .attention.score_text.scores import Mask, Score


@refuses_foreign
def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Array | None = None,
    **foreign: NoReturn,
) -> Array | tuple[Array, Array, None]:
    """`cupyflash.attention` in flash-attn's signature.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float16, bfloat16 or float32.
        k: (batch, seqlen_k, heads_kv, head_dim), dtype of q.
        v: like k; its head_dim may be another one.
        dropout_p: as in `cupyflash.attention`; the seed is drawn from the generator of the library:
            torch's, or that of CuPy or NumPy.
        softmax_scale: of the scores; default ``1 / sqrt(head_dim)``.
        causal: the last query sees the last key ("bottom-right").
        window_size: (left, right), the keys seen on each side of the diagonal; -1 or None is
            unlimited. Less than -1 is refused: flash-attn 2 and 3 take it for unlimited, and
            flash-attn 4 for a window that lies beside the diagonal.
        softcap, alibi_slopes, deterministic, sinks: as in `cupyflash.attention`.
        return_attn_probs: return (out, softmax_lse, None).

    Returns:
        out (batch, seqlen_q, heads_q, head_dim of v); softmax_lse float32 (batch, heads_q,
        seqlen_q), natural logarithm.

    Raises:
        TypeError, ValueError, NotImplementedError: as `cupyflash.attention`.

    Source: the signatures of flash-attn 2.8, github.com/Dao-AILab/flash-attention.
    """
    if foreign:
        refuse(flash_attn_func, foreign)
    options = {
        "dropout_p": dropout_p, "scale": softmax_scale, "causal": causal,
        "window": window_size, "softcap": softcap, "deterministic": deterministic,
    }  # fmt: skip
    return call("flash_attn_func", q, k, v, options, alibi_slopes, sinks, return_attn_probs)


@refuses_foreign
def flash_attn_kvpacked_func(
    q: Array,
    kv: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Array | None = None,
    **foreign: NoReturn,
) -> Array | tuple[Array, Array, None]:
    """`flash_attn_func` with k and v in one array, kv (batch, seqlen_k, 2, heads_kv, head_dim)."""
    if foreign:
        refuse(flash_attn_kvpacked_func, foreign)
    function = "flash_attn_kvpacked_func"
    k, v = unpack(function, "kv", kv, 5, 2)
    options = {
        "dropout_p": dropout_p, "scale": softmax_scale, "causal": causal,
        "window": window_size, "softcap": softcap, "deterministic": deterministic,
    }  # fmt: skip
    return call(function, q, k, v, options, alibi_slopes, sinks, return_attn_probs)


@refuses_foreign
def flash_attn_qkvpacked_func(
    qkv: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Array | None = None,
    **foreign: NoReturn,
) -> Array | tuple[Array, Array, None]:
    """`flash_attn_func` with q, k and v in one array, qkv (batch, seqlen, 3, heads, head_dim)."""
    if foreign:
        refuse(flash_attn_qkvpacked_func, foreign)
    function = "flash_attn_qkvpacked_func"
    q, k, v = unpack(function, "qkv", qkv, 5, 3)
    options = {
        "dropout_p": dropout_p, "scale": softmax_scale, "causal": causal,
        "window": window_size, "softcap": softcap, "deterministic": deterministic,
    }  # fmt: skip
    return call(function, q, k, v, options, alibi_slopes, sinks, return_attn_probs)


@refuses_foreign
def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array | None,
    cu_seqlens_k: Array | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
    *,
    sinks: Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    score: "Score | Callable | None" = None,
    mask: "Mask | Callable | None" = None,
    **foreign: NoReturn,
) -> Array | tuple[Array, Array, None]:
    """Attention of sequences packed one after another, without padding.

    Queries, or keys and values, may also be padded: without cu_seqlens they are (batch, seqlen,
    heads, head_dim).

    Args:
        q: (total_q, heads_q, head_dim), float16, bfloat16 or float32.
        k: (total_k, heads_kv, head_dim), dtype of q.
        v: like k; its head_dim may be another one.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1), the first row of each sequence and the end of
            the last; None where the sequences are padded. Their values are checked on the CPU, and
            on a GPU with CUPYFLASH_DEBUG=1: reading them costs a synchronisation.
        max_seqlen_q, max_seqlen_k: the longest sequences; not used of padded ones.
        dropout_p to return_attn_probs, sinks: as in `flash_attn_func`.
        seqused_q, seqused_k: int32 (batch,), the first rows of each sequence that count, as in
            `cupyflash.attention`.
        block_table: int32 (batch, max_pages): k and v are pages of any size, (num_pages, page_size,
            heads_kv, head_dim), and key j of sequence b is row ``j % page_size`` of page
            ``block_table[b, j // page_size]``; the lengths are those of cu_seqlens_k or seqused_k.
        score, mask: as in `cupyflash.attention`, with batch the number of the sequence, and query
            and key counted from its beginning; not with a block_table.

    Returns:
        out like q, with the head_dim of v; with return_attn_probs (out, softmax_lse, None), where
        softmax_lse is float32 (heads_q, total_q), of padded queries (batch, heads_q, seqlen_q).

    Raises:
        NotImplementedError: dropout, gradients, seqused_q, a score or a mask with a block_table,
            and as `cupyflash.attention`.
        TypeError, ValueError: as `cupyflash.attention`.
    """
    if foreign:
        refuse(flash_attn_varlen_func, foreign)
    function = "flash_attn_varlen_func"
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    options = {
        "dropout_p": dropout_p, "scale": softmax_scale, "causal": causal,
        "window": window_size, "softcap": softcap, "deterministic": deterministic,
    }  # fmt: skip
    if block_table is not None:
        if score is not None or mask is not None:
            fact = "score and mask must be None beside a block_table"
            raise NotImplementedError(f"{function}: {fact}, got score={score}, mask={mask}")
        return paged_varlen(
            function, (q, k, v), lengths, block_table, options, alibi_slopes, sinks,
            plain_flag(function, "return_attn_probs", return_attn_probs),
        )  # fmt: skip
    written = (alibi_slopes, sinks, return_attn_probs, lengths, score, mask)
    return call(function, q, k, v, options, *written)


@refuses_foreign
def flash_attn_varlen_kvpacked_func(
    q: Array,
    kv: Array,
    cu_seqlens_q: Array | None,
    cu_seqlens_k: Array | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    score: "Score | Callable | None" = None,
    mask: "Mask | Callable | None" = None,
    **foreign: NoReturn,
) -> Array | tuple[Array, Array, None]:
    """`flash_attn_varlen_func` with k and v in one array.

    Args:
        kv: (total_k, 2, heads_kv, head_dim), or padded (batch, seqlen_k, 2, heads_kv, head_dim).
    """
    if foreign:
        refuse(flash_attn_varlen_kvpacked_func, foreign)
    function = "flash_attn_varlen_kvpacked_func"
    k, v = unpack(function, "kv", kv, 5 if cu_seqlens_k is None else 4, 2)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    options = {
        "dropout_p": dropout_p, "scale": softmax_scale, "causal": causal,
        "window": window_size, "softcap": softcap, "deterministic": deterministic,
    }  # fmt: skip
    written = (alibi_slopes, sinks, return_attn_probs, lengths, score, mask)
    return call(function, q, k, v, options, *written)


@refuses_foreign
def flash_attn_varlen_qkvpacked_func(
    qkv: Array,
    cu_seqlens: Array,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    score: "Score | Callable | None" = None,
    mask: "Mask | Callable | None" = None,
    **foreign: NoReturn,
) -> Array | tuple[Array, Array, None]:
    """`flash_attn_varlen_func` with q, k and v in one array, qkv (total, 3, heads, head_dim)."""
    if foreign:
        refuse(flash_attn_varlen_qkvpacked_func, foreign)
    function = "flash_attn_varlen_qkvpacked_func"
    q, k, v = unpack(function, "qkv", qkv, 4, 3)
    if cu_seqlens is None:
        raise TypeError(f"{function}: cu_seqlens must be int32 (batch + 1), got None")
    lengths = Lengths(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, seqused_q, seqused_k)
    options = {
        "dropout_p": dropout_p, "scale": softmax_scale, "causal": causal,
        "window": window_size, "softcap": softcap, "deterministic": deterministic,
    }  # fmt: skip
    written = (alibi_slopes, sinks, return_attn_probs, lengths, score, mask)
    return call(function, q, k, v, options, *written)
