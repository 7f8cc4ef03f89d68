"""Types of `cached_attention.py`: how a result depends on ``return_lse``."""

from typing import Literal, TypedDict, overload

from typing_extensions import Unpack

from ...runtime.array import ArrayLike, ArrayT

class _CacheOptions(TypedDict, total=False):
    page_table: ArrayLike | None
    sequences: ArrayLike | None
    cu_seqlens_q: ArrayLike | None
    max_seqlen_q: int | None
    causal: bool | Literal["bottom-right"]
    scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None
    leftpad: ArrayLike | None
    k_scale: ArrayLike | None
    v_scale: ArrayLike | None
    num_splits: int
    out: ArrayLike | None

@overload
def attention_with_cache(
    q: ArrayT,
    k: ArrayLike | None,
    v: ArrayLike | None,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    positions: ArrayLike,
    *,
    page_table: ArrayLike | None = None,
    sequences: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    max_seqlen_q: int | None = None,
    causal: bool | Literal["bottom-right"] = True,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    leftpad: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    num_splits: int = 0,
    out: ArrayLike | None = None,
    return_lse: Literal[False] = False,
) -> ArrayT: ...
@overload
def attention_with_cache(
    q: ArrayT,
    k: ArrayLike | None,
    v: ArrayLike | None,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    positions: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[_CacheOptions],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention_with_cache(
    q: ArrayT,
    k: ArrayLike | None,
    v: ArrayLike | None,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    positions: ArrayLike,
    *,
    return_lse: bool,
    **options: Unpack[_CacheOptions],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
