"""Types of `flash_attn_cache.py`: how a result depends on the options."""

from typing import Any, Literal, TypedDict, overload

from typing_extensions import Unpack

from ..runtime.array import ArrayLike, ArrayT

class _CacheOptions(TypedDict, total=False):
    k: ArrayLike | None
    v: ArrayLike | None
    rotary_cos: ArrayLike | None
    rotary_sin: ArrayLike | None
    cache_seqlens: int | ArrayLike | None
    cache_batch_idx: ArrayLike | None
    cache_leftpad: ArrayLike | None
    block_table: ArrayLike | None
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    rotary_interleaved: bool
    alibi_slopes: ArrayLike | None
    num_splits: int
    page_table: ArrayLike | None
    cu_seqlens_q: ArrayLike | None
    max_seqlen_q: int | None
    k_descale: ArrayLike | None
    v_descale: ArrayLike | None
    sinks: ArrayLike | None

@overload
def flash_attn_with_kvcache(
    q: ArrayT,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    rotary_cos: ArrayLike | None = None,
    rotary_sin: ArrayLike | None = None,
    cache_seqlens: int | ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    cache_leftpad: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: ArrayLike | None = None,
    num_splits: int = 0,
    return_softmax_lse: Literal[False] = False,
    *,
    page_table: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    max_seqlen_q: int | None = None,
    k_descale: ArrayLike | None = None,
    v_descale: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
) -> ArrayT: ...
@overload
def flash_attn_with_kvcache(
    q: ArrayT,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    *positional: Any,
    return_softmax_lse: Literal[True],
    **options: Unpack[_CacheOptions],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def flash_attn_with_kvcache(
    q: ArrayT,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    *positional: Any,
    return_softmax_lse: bool,
    **options: Unpack[_CacheOptions],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
