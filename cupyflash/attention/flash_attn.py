"""The names, signatures and meaning of flash-attn 2.8, so that a change of import is enough.

Layout (batch, seqlen, heads, head_dim), or (total, heads, head_dim) for packed sequences;
``causal`` is aligned bottom-right. ``return_attn_probs=True`` returns (out, softmax_lse, None):
the probabilities themselves exist nowhere.
"""

from ..array import Array
from ..plain_options import plain_flag
from .dispatch import forward
from .extras import NO_EXTRAS, Extras


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
) -> Array | tuple[Array, Array, None]:
    """`cupyflash.attention` in flash-attn's signature; ``window_size`` -1 is unlimited.

    Dropout follows the generator of the library: torch's, or that of CuPy or NumPy.

    Raises:
        TypeError, ValueError: as `cupyflash.attention`.
    """
    options = (causal, softmax_scale, window_size, softcap, "bshd", None, dropout_p)
    return _call(
        "flash_attn_func", q, k, v, options, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


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
) -> Array | tuple[Array, Array, None]:
    """`flash_attn_func` with kv (batch, seqlen_k, 2, heads_kv, head_dim)."""
    k, v = _unpack("flash_attn_kvpacked_func", "kv", kv, 5, 2)
    options = (causal, softmax_scale, window_size, softcap, "bshd", None, dropout_p)
    return _call(
        "flash_attn_kvpacked_func", q, k, v, options, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


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
) -> Array | tuple[Array, Array, None]:
    """`flash_attn_func` with qkv (batch, seqlen, 3, heads, head_dim)."""
    q, k, v = _unpack("flash_attn_qkvpacked_func", "qkv", qkv, 5, 3)
    options = (causal, softmax_scale, window_size, softcap, "bshd", None, dropout_p)
    return _call(
        "flash_attn_qkvpacked_func", q, k, v, options, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
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
) -> Array | tuple[Array, Array, None]:
    """Attention of sequences packed one after another, without padding.

    Args:
        q: (total_q, heads_q, head_dim).
        k, v: (total_k, heads_kv, head_dim).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1), the first row of each sequence and the end of
            the last. Their values are checked on the CPU, and on a GPU with CUPYFLASH_DEBUG=1:
            reading them costs a synchronisation.
        max_seqlen_q, max_seqlen_k: the longest sequences.

    Returns:
        out like q; with return_attn_probs (out, softmax_lse (heads_q, total_q), None).

    Raises:
        NotImplementedError: block_table.
        TypeError, ValueError: as `cupyflash.attention`.
    """
    function = "flash_attn_varlen_func"
    if block_table is not None:
        fact = "paged keys and values are not built, block_table must be None"
        raise NotImplementedError(f"{function}: {fact}, got a {type(block_table).__name__}")
    lengths = (max_seqlen_q, max_seqlen_k)
    options = (causal, softmax_scale, window_size, softcap, "thd", lengths, dropout_p)
    return _call(
        function, q, k, v, options, alibi_slopes, deterministic, return_attn_probs,
        (cu_seqlens_q, cu_seqlens_k),
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Array,
    kv: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
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
) -> Array | tuple[Array, Array, None]:
    """`flash_attn_varlen_func` with kv (total_k, 2, heads_kv, head_dim)."""
    function = "flash_attn_varlen_kvpacked_func"
    k, v = _unpack(function, "kv", kv, 4, 2)
    lengths = (max_seqlen_q, max_seqlen_k)
    options = (causal, softmax_scale, window_size, softcap, "thd", lengths, dropout_p)
    return _call(
        function, q, k, v, options, alibi_slopes, deterministic, return_attn_probs,
        (cu_seqlens_q, cu_seqlens_k),
    )  # fmt: skip


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
) -> Array | tuple[Array, Array, None]:
    """`flash_attn_varlen_func` with qkv (total, 3, heads, head_dim)."""
    function = "flash_attn_varlen_qkvpacked_func"
    q, k, v = _unpack(function, "qkv", qkv, 4, 3)
    lengths = (max_seqlen, max_seqlen)
    options = (causal, softmax_scale, window_size, softcap, "thd", lengths, dropout_p)
    return _call(
        function, q, k, v, options, alibi_slopes, deterministic, return_attn_probs,
        (cu_seqlens, cu_seqlens),
    )  # fmt: skip


def _call(
    function: str,
    q: Array,
    k: Array,
    v: Array,
    options: tuple,
    alibi_slopes: Array | None,
    deterministic: bool,
    return_attn_probs: bool,
    cu_seqlens: tuple[Array, Array] | None = None,
) -> Array | tuple[Array, Array, None]:
    return_attn_probs = plain_flag(function, "return_attn_probs", return_attn_probs)
    extras = NO_EXTRAS
    if not alibi_slopes is cu_seqlens is None:
        extras = Extras(*cu_seqlens or (None, None), alibi_slopes)
    out, lse = forward(function, q, k, v, options, extras, deterministic, return_attn_probs)
    return (out, lse, None) if return_attn_probs else out


def _unpack(function: str, name: str, packed: Array, rank: int, parts: int) -> list[Array]:
    """The parts along the axis before the heads, as views."""
    shape = getattr(packed, "shape", ())
    shape = tuple(shape) if isinstance(shape, tuple) else ()  # no class of arrays
    if len(shape) != rank or shape[-3] != parts:
        axes = "(batch, seqlen" if rank == 5 else "(total"
        fact = f"{name} must be {axes}, {parts}, heads, head_dim)"
        raise ValueError(f"{function}: {fact}, got {shape or type(packed).__name__}")
    return [packed[..., part, :, :] for part in range(parts)]
