"""Types of the public functions of `flash_attn.py`: how a result depends on the options.

The first overload of a function is its whole signature; the others leave options to ``**options``.
"""

from collections.abc import Callable
from typing import Any, Literal, TypedDict, overload

from typing_extensions import Unpack

from ..runtime.array import ArrayLike, ArrayT
from .attention.score_text.scores import Mask, Score

_Score = Score | Callable[..., Any] | None
_Mask = Mask | Callable[..., Any] | None

class _FlashOptions(TypedDict, total=False):
    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: ArrayLike | None
    deterministic: bool
    sinks: ArrayLike | None

class _VarlenOptions(_FlashOptions, total=False):
    seqused_q: ArrayLike | None
    seqused_k: ArrayLike | None
    score: _Score
    mask: _Mask

class _PagedOptions(_VarlenOptions, total=False):
    block_table: ArrayLike | None

@overload
def flash_attn_func(
    q: ArrayT,
    k: ArrayLike,
    v: ArrayLike,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    sinks: ArrayLike | None = None,
) -> ArrayT: ...
@overload
def flash_attn_func(
    q: ArrayT,
    k: ArrayLike,
    v: ArrayLike,
    *positional: Any,
    return_attn_probs: Literal[True],
    **options: Unpack[_FlashOptions],
) -> tuple[ArrayT, ArrayT, None]: ...
@overload
def flash_attn_func(
    q: ArrayT,
    k: ArrayLike,
    v: ArrayLike,
    *positional: Any,
    return_attn_probs: bool,
    **options: Unpack[_FlashOptions],
) -> ArrayT | tuple[ArrayT, ArrayT, None]: ...
@overload
def flash_attn_kvpacked_func(
    q: ArrayT,
    kv: ArrayLike,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    sinks: ArrayLike | None = None,
) -> ArrayT: ...
@overload
def flash_attn_kvpacked_func(
    q: ArrayT,
    kv: ArrayLike,
    *positional: Any,
    return_attn_probs: Literal[True],
    **options: Unpack[_FlashOptions],
) -> tuple[ArrayT, ArrayT, None]: ...
@overload
def flash_attn_kvpacked_func(
    q: ArrayT,
    kv: ArrayLike,
    *positional: Any,
    return_attn_probs: bool,
    **options: Unpack[_FlashOptions],
) -> ArrayT | tuple[ArrayT, ArrayT, None]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: ArrayT,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    sinks: ArrayLike | None = None,
) -> ArrayT: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: ArrayT,
    *positional: Any,
    return_attn_probs: Literal[True],
    **options: Unpack[_FlashOptions],
) -> tuple[ArrayT, ArrayT, None]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: ArrayT, *positional: Any, return_attn_probs: bool, **options: Unpack[_FlashOptions]
) -> ArrayT | tuple[ArrayT, ArrayT, None]: ...
@overload
def flash_attn_varlen_func(
    q: ArrayT,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike | None,
    cu_seqlens_k: ArrayLike | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    block_table: ArrayLike | None = None,
    *,
    sinks: ArrayLike | None = None,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    score: _Score = None,
    mask: _Mask = None,
) -> ArrayT: ...
@overload
def flash_attn_varlen_func(
    q: ArrayT,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike | None,
    cu_seqlens_k: ArrayLike | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *positional: Any,
    return_attn_probs: Literal[True],
    **options: Unpack[_PagedOptions],
) -> tuple[ArrayT, ArrayT, None]: ...
@overload
def flash_attn_varlen_func(
    q: ArrayT,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike | None,
    cu_seqlens_k: ArrayLike | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *positional: Any,
    return_attn_probs: bool,
    **options: Unpack[_PagedOptions],
) -> ArrayT | tuple[ArrayT, ArrayT, None]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: ArrayT,
    kv: ArrayLike,
    cu_seqlens_q: ArrayLike | None,
    cu_seqlens_k: ArrayLike | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    sinks: ArrayLike | None = None,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    score: _Score = None,
    mask: _Mask = None,
) -> ArrayT: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: ArrayT,
    kv: ArrayLike,
    cu_seqlens_q: ArrayLike | None,
    cu_seqlens_k: ArrayLike | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *positional: Any,
    return_attn_probs: Literal[True],
    **options: Unpack[_VarlenOptions],
) -> tuple[ArrayT, ArrayT, None]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: ArrayT,
    kv: ArrayLike,
    cu_seqlens_q: ArrayLike | None,
    cu_seqlens_k: ArrayLike | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *positional: Any,
    return_attn_probs: bool,
    **options: Unpack[_VarlenOptions],
) -> ArrayT | tuple[ArrayT, ArrayT, None]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: ArrayT,
    cu_seqlens: ArrayLike,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    sinks: ArrayLike | None = None,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    score: _Score = None,
    mask: _Mask = None,
) -> ArrayT: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: ArrayT,
    cu_seqlens: ArrayLike,
    max_seqlen: int,
    *positional: Any,
    return_attn_probs: Literal[True],
    **options: Unpack[_VarlenOptions],
) -> tuple[ArrayT, ArrayT, None]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: ArrayT,
    cu_seqlens: ArrayLike,
    max_seqlen: int,
    *positional: Any,
    return_attn_probs: bool,
    **options: Unpack[_VarlenOptions],
) -> ArrayT | tuple[ArrayT, ArrayT, None]: ...
