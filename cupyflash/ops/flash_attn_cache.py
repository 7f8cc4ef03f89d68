"""`flash_attn_with_kvcache` of flash-attn 2.8, with what 3 and 4 add."""

from typing import Any, NoReturn

from ..runtime.array import Array, compiling
from ..runtime.checks import integer_within, plain_flag
from ..runtime.lookup import library_of
from ..runtime.scratch import array_operations
from .attention.foreign import refuse, refuses_foreign
from .decode.operations import ATTENTION, plain
from .flash_attn_rotary import Angles, filled, rotated

FUNCTION = "flash_attn_with_kvcache"
MOST = 2**31 - 1  # keys of a sequence
REFUSED = {  # of flash-attn 3 and 4
    "qv": "queries beside those of the rotary part (MLA) have no kernel",
    "q_descale": "queries have 16 or 32 bits, only caches have 8",
    "attention_chunk": "chunked masks are not built, window_size is what hides keys",
    "scheduler_metadata": "the kernels divide their work themselves, leave it out",
    "cu_seqlens_k_new": "packed k and v have the sequences of cu_seqlens_q",
    "rotary_seqlens": "the angles follow cache_seqlens",
}


@refuses_foreign
def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: int | Array | None = None,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    block_table: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Array | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Array | None = None,
    cu_seqlens_q: Array | None = None,
    max_seqlen_q: int | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    sinks: Array | None = None,
    **foreign: NoReturn,
) -> Array | tuple[Array, Array]:
    """`cupyflash.attention_with_cache` in flash-attn's signature; no gradients.

    Args:
        q: (batch, seqlen, heads_q, head_dim), or packed (total, heads_q, head_dim) with
            ``cu_seqlens_q``.
        k_cache, v_cache: (batch_cache, seqlen_cache, heads_kv, head_dim), or with a table
            (num_pages, page_size, heads_kv, head_dim), pages of any size; written if there is k.
        k, v: (batch, seqlen_new, heads_kv, head_dim), appended at ``cache_seqlens``; packed they
            have the sequences of q.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), dtype of q or float32: k is rotated at
            its places, q at those from ``cache_seqlens`` on, or, without a causal mask or window,
            at ``cache_seqlens``. Steps of their own before the kernel.
        cache_seqlens: int32 (batch,) or an integer, the keys in the cache before the call; None,
            without k: all of it.
        cache_batch_idx: int32 (batch,), the sequence of the cache that each sequence has.
        cache_leftpad: int32 (batch,), the first key of each sequence.
        block_table, page_table: int32 (batch, max_pages), two names of one argument.
        window_size: as in `flash_attn_func`.
        num_splits: as in `attention_with_cache`; 0 leaves it to the kernel.
        k_descale, v_descale: float32, what multiplies a cache of 8 bits; broadcast to (num_pages,
            page_size, heads_kv), which flash-attn's (batch, heads_kv) does not.
        sinks: as in `cupyflash.attention`.

    Returns:
        out like q; with return_softmax_lse (out, softmax_lse (batch, heads_q, seqlen), packed
        (heads_q, total)). A query that sees no key gives 0 and -inf.

    Raises:
        NotImplementedError: ``qv``, ``q_descale``, ``attention_chunk``, ``scheduler_metadata``, and
            as `attention_with_cache`.
        TypeError, ValueError: as `attention_with_cache`; angles without k, or that are too wide.
    """
    _refuse(foreign)
    options = plain(
        FUNCTION, causal=causal, scale=softmax_scale, window=window_size, softcap=softcap,
        num_splits=num_splits, return_lse=return_softmax_lse, max_seqlen_q=max_seqlen_q,
        counted=False,
    )  # fmt: skip
    table = _one_table(block_table, page_table)
    if not compiling() and library_of(q) is None:  # the operation says what is wrong with it
        ATTENTION(FUNCTION, (q, *[None] * 14), options)
    with array_operations(q):
        lengths = _lengths(q, k_cache, k, cache_seqlens, cu_seqlens_q, table)
        if rotary_cos is not None or rotary_sin is not None:
            pairs = plain_flag(FUNCTION, "rotary_interleaved", rotary_interleaved)
            angles = Angles(rotary_cos, rotary_sin, pairs)
            ends = any(side not in (None, -1) for side in options[0].window or ())
            moves = bool(options[0].causal or ends)
            q, k = rotated(FUNCTION, q, k, angles, lengths, cu_seqlens_q, moves)
    out, lse = ATTENTION(
        FUNCTION,
        (
            q, k, v, k_cache, v_cache, lengths, table, cache_batch_idx, cu_seqlens_q, alibi_slopes,
            sinks, cache_leftpad, k_descale, v_descale, None,
        ),
        options,
    )  # fmt: skip
    return (out, lse) if options[0].return_lse else out


def _refuse(foreign: dict[str, Any]) -> None:
    """Raises an error for keywords that have a value; those of flash-attn 3 and 4 may be unused."""
    for name, x in foreign.items():
        if name not in REFUSED:
            refuse(flash_attn_with_kvcache, {name: x})
        if x is not None and not (name == "attention_chunk" and x == 0):
            got = f"got {name} as a {type(x).__name__}"
            raise NotImplementedError(f"{FUNCTION}: {name} must be None, {REFUSED[name]}, {got}")


def _one_table(block_table: Array | None, page_table: Array | None) -> Array | None:
    if block_table is not None and page_table is not None:
        fact = "block_table and page_table are two names of one argument"
        raise TypeError(f"{FUNCTION}: {fact}, got both")
    return page_table if block_table is None else block_table


def _lengths(
    q: Array,
    k_cache: Array,
    k: Array | None,
    cache_seqlens: int | Array | None,
    cu_seqlens_q: Array | None,
    table: Array | None,
) -> Array:
    """The keys of each sequence before the call."""
    room = min(MOST, _size(k_cache, 1, MOST) * (1 if table is None else _size(table, 1, MOST)))
    if cache_seqlens is None:
        if k is not None:
            fact = "cache_seqlens must say where k and v are appended"
            raise TypeError(f"{FUNCTION}: {fact}, got None")
        cache_seqlens = room
    if not isinstance(cache_seqlens, int) or isinstance(cache_seqlens, bool):
        return cache_seqlens
    if k is not None and cu_seqlens_q is None:
        room -= _size(k, 1, 0)
    # An array of them is on the GPU, which does not check it.
    cache_seqlens = integer_within(FUNCTION, "cache_seqlens", cache_seqlens, 0, room)
    batch = _size(q, 0, 0) if cu_seqlens_q is None else max(0, _size(cu_seqlens_q, 0, 1) - 1)
    return filled(q, batch, cache_seqlens)


def _size(x: Any, axis: int, default: int) -> int:
    """The size of an axis; the default where there is none, of which the operation complains."""
    shape = tuple(getattr(x, "shape", ()))
    return shape[axis] if axis < len(shape) else default
