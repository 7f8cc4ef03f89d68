"""The names, signatures and meaning of flash-attn 2.8, so that a change of import is enough.

Layout (batch, seqlen, heads, head_dim), or (total, heads, head_dim) for packed sequences;
``causal`` is aligned bottom-right. ``return_attn_probs=True`` returns (out, softmax_lse, None),
both differentiable: the probabilities themselves exist nowhere.

What flash-attn 2.8 does not have is keyword-only: ``sinks`` as in `cupyflash.attention`, and of
packed sequences ``seqused_q`` and ``seqused_k`` as in flash-attn 3.
"""

from typing import NamedTuple, NoReturn

from ..runtime.array import Array
from ..runtime.checks import plain_flag
from .foreign import refuse, refuses_foreign
from .operations import FORWARD
from .options import Extras, plain_options


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
        window_size: (left, right), the keys seen on each side of the diagonal; -1 or None is
            unlimited. Less than -1 is refused: flash-attn 2 and 3 take it for unlimited, and
            flash-attn 4 for a window that lies beside the diagonal.

    Dropout follows the generator of the library: torch's, or that of CuPy or NumPy.

    Raises:
        TypeError, ValueError, NotImplementedError: as `cupyflash.attention`.
    """
    if foreign:
        refuse(flash_attn_func, foreign)
    options = (dropout_p, softmax_scale, causal, window_size, softcap)
    return call(
        "flash_attn_func", q, k, v, options, alibi_slopes, sinks, deterministic, return_attn_probs
    )


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
    """`flash_attn_func` with kv (batch, seqlen_k, 2, heads_kv, head_dim)."""
    if foreign:
        refuse(flash_attn_kvpacked_func, foreign)
    function = "flash_attn_kvpacked_func"
    k, v = unpack(function, "kv", kv, 5, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap)
    return call(function, q, k, v, options, alibi_slopes, sinks, deterministic, return_attn_probs)


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
    """`flash_attn_func` with qkv (batch, seqlen, 3, heads, head_dim)."""
    if foreign:
        refuse(flash_attn_qkvpacked_func, foreign)
    function = "flash_attn_qkvpacked_func"
    q, k, v = unpack(function, "qkv", qkv, 5, 3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap)
    return call(function, q, k, v, options, alibi_slopes, sinks, deterministic, return_attn_probs)


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
    **foreign: NoReturn,
) -> Array | tuple[Array, Array, None]:
    """Attention of sequences packed one after another, without padding.

    Queries, or keys and values, may also be padded: without cu_seqlens they are (batch, seqlen,
    heads, head_dim).

    Args:
        q: (total_q, heads_q, head_dim).
        k, v: (total_k, heads_kv, head_dim).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1), the first row of each sequence and the end of
            the last; None where the sequences are padded. Their values are checked on the CPU, and
            on a GPU with CUPYFLASH_DEBUG=1: reading them costs a synchronisation.
        max_seqlen_q, max_seqlen_k: the longest sequences; not used of padded ones.
        seqused_q, seqused_k: int32 (batch,), the first rows of each sequence that count, as in
            `cupyflash.attention`.

    Returns:
        out like q; with return_attn_probs (out, softmax_lse (heads_q, total_q), None), of padded
        queries softmax_lse (batch, heads_q, seqlen_q).

    Raises:
        NotImplementedError: block_table, and as `cupyflash.attention`.
        TypeError, ValueError: as `cupyflash.attention`.
    """
    if foreign:
        refuse(flash_attn_varlen_func, foreign)
    function = "flash_attn_varlen_func"
    if block_table is not None:
        fact = "paged keys and values are not built, block_table must be None"
        raise NotImplementedError(f"{function}: {fact}, got a {type(block_table).__name__}")
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    options = (dropout_p, softmax_scale, causal, window_size, softcap)
    return call(
        function, q, k, v, options, alibi_slopes, sinks, deterministic, return_attn_probs, lengths
    )


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
    **foreign: NoReturn,
) -> Array | tuple[Array, Array, None]:
    """`flash_attn_varlen_func` with kv (total_k, 2, heads_kv, head_dim), or padded (batch,
    seqlen_k, 2, heads_kv, head_dim).
    """
    if foreign:
        refuse(flash_attn_varlen_kvpacked_func, foreign)
    function = "flash_attn_varlen_kvpacked_func"
    k, v = unpack(function, "kv", kv, 5 if cu_seqlens_k is None else 4, 2)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    options = (dropout_p, softmax_scale, causal, window_size, softcap)
    return call(
        function, q, k, v, options, alibi_slopes, sinks, deterministic, return_attn_probs, lengths
    )


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
    **foreign: NoReturn,
) -> Array | tuple[Array, Array, None]:
    """`flash_attn_varlen_func` with qkv (total, 3, heads, head_dim)."""
    if foreign:
        refuse(flash_attn_varlen_qkvpacked_func, foreign)
    function = "flash_attn_varlen_qkvpacked_func"
    q, k, v = unpack(function, "qkv", qkv, 4, 3)
    if cu_seqlens is None:
        raise TypeError(f"{function}: cu_seqlens must be int32 (batch + 1), got None")
    lengths = Lengths(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, seqused_q, seqused_k)
    options = (dropout_p, softmax_scale, causal, window_size, softcap)
    return call(
        function, q, k, v, options, alibi_slopes, sinks, deterministic, return_attn_probs, lengths
    )


class Lengths(NamedTuple):
    """The offsets at which the sequences of varlen functions begin and end."""

    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: Array | None
    seqused_k: Array | None


def call(
    function: str,
    q: Array,
    k: Array,
    v: Array,
    options: tuple,
    alibi_slopes: Array | None,
    sinks: Array | None,
    deterministic: bool,
    return_attn_probs: bool,
    lengths: Lengths | None = None,
) -> Array | tuple[Array, Array, None]:
    """The result of ``function``.

    Args:
        options: dropout_p, softmax_scale, causal, window_size and softcap.
    """
    dropout_p, scale, causal, window_size, softcap = options
    return_attn_probs = plain_flag(function, "return_attn_probs", return_attn_probs)
    layout, max_seqlens, arrays = "bshd", None, (q, k, v)
    if lengths is not None:
        layout, max_seqlens = _packed_layout(q, k, lengths)
        arrays += (
            lengths.cu_seqlens_q, lengths.cu_seqlens_k, alibi_slopes, None, sinks, None,
            lengths.seqused_q, lengths.seqused_k,
        )  # fmt: skip
    elif not alibi_slopes is sinks is None:
        arrays = (*arrays, *Extras(alibi_slopes=alibi_slopes, sinks=sinks))
    options = (causal, scale, window_size, softcap, layout, max_seqlens, dropout_p)
    options = plain_options(function, (*options, deterministic, "ieee"))
    out, lse = FORWARD(function, arrays, (options, return_attn_probs))
    return (out, lse, None) if return_attn_probs else out


def _packed_layout(q: Array, k: Array, lengths: Lengths) -> tuple[str, tuple[int, int] | None]:
    """The layout, "thd" where there are cu_seqlens, and the longest sequences."""
    packed_q, packed_k = lengths.cu_seqlens_q is not None, lengths.cu_seqlens_k is not None
    if packed_q and packed_k:
        return "thd", (lengths.max_seqlen_q, lengths.max_seqlen_k)
    if packed_q:
        return "thd-bshd", (lengths.max_seqlen_q, _padded_length(k))
    if packed_k:
        return "bshd-thd", (_padded_length(q), lengths.max_seqlen_k)
    return "bshd", None


def _padded_length(x: Array) -> int:
    """Rows of padded sequences; whether x has such an axis is checked later."""
    shape = getattr(x, "shape", ())
    return shape[1] if isinstance(shape, tuple) and len(shape) > 1 else 0


def unpack(function: str, name: str, packed: Array, rank: int, parts: int) -> list[Array]:
    """The parts along the axis before the heads, as views."""
    shape = getattr(packed, "shape", ())
    shape = tuple(shape) if isinstance(shape, tuple) else ()  # no class of arrays
    if len(shape) != rank or shape[-3] != parts:
        axes = "(batch, seqlen" if rank == 5 else "(total"
        fact = f"{name} must be {axes}, {parts}, heads, head_dim)"
        raise ValueError(f"{function}: {fact}, got {shape or type(packed).__name__}")
    return [packed[..., part, :, :] for part in range(parts)]
