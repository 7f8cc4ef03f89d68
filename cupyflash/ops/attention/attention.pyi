"""Types of the public functions of `attention.py`: how a result depends on the options.

The first overload of a function is its whole signature; the others leave options to ``**options``.
"""

from collections.abc import Callable
from typing import Any, Literal, TypedDict, overload

from typing_extensions import Unpack

from ...runtime.array import ArrayLike, ArrayT
from .options import Gradients
from .score_text.arguments import ScoreGradients
from .score_text.scores import Mask, Score

_Causal = bool | Literal["bottom-right", "top-left"]
_Window = tuple[int | None, int | None] | None
_Layout = Literal["bshd", "bhsd"]
_Precision = Literal["ieee", "tf32"]
_Score = Score | Callable[..., Any] | None
_Mask = Mask | Callable[..., Any] | None

class _Options(TypedDict, total=False):
    causal: _Causal
    scale: float | None
    window: _Window
    softcap: float
    alibi_slopes: ArrayLike | None
    bias: ArrayLike | None
    score: _Score
    mask: _Mask
    dropout_p: float
    dropout_seed: int | ArrayLike | None
    seqused_q: ArrayLike | None
    seqused_k: ArrayLike | None
    layout: _Layout
    deterministic: bool
    precision: _Precision

class _ForwardOptions(_Options, total=False):
    sinks: ArrayLike | None

class _BackwardOptions(_Options, total=False):
    dlse: ArrayLike | None

@overload
def attention(
    q: ArrayT,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: _Causal = False,
    scale: float | None = None,
    window: _Window = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    score: _Score = None,
    mask: _Mask = None,
    dropout_p: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    layout: _Layout = "bshd",
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    precision: _Precision = "ieee",
) -> ArrayT: ...
@overload
def attention(
    q: ArrayT,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[_ForwardOptions],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: ArrayT, k: ArrayLike, v: ArrayLike, *, return_lse: bool, **options: Unpack[_ForwardOptions]
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
@overload
def attention_backward(
    dout: ArrayLike,
    q: ArrayT,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    causal: _Causal = False,
    scale: float | None = None,
    window: _Window = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    sinks: None = None,
    score: _Score = None,
    mask: _Mask = None,
    dropout_p: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    layout: _Layout = "bshd",
    bias_grad: Literal[False] = False,
    score_grad: Literal[False] = False,
    deterministic: bool = False,
    precision: _Precision = "ieee",
    dlse: ArrayLike | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]: ...
@overload
def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    sinks: ArrayLike | None = None,
    bias_grad: Literal[True],
    **options: Unpack[_BackwardOptions],
) -> Gradients: ...
@overload
def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    sinks: ArrayLike,
    bias_grad: bool = False,
    **options: Unpack[_BackwardOptions],
) -> Gradients: ...
@overload
def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    sinks: ArrayLike | None = None,
    bias_grad: bool = False,
    score_grad: Literal[True],
    **options: Unpack[_BackwardOptions],
) -> ScoreGradients: ...
@overload
def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    sinks: ArrayLike | None = None,
    bias_grad: bool = False,
    score_grad: bool = False,
    **options: Unpack[_BackwardOptions],
) -> Any: ...  # a tuple of three, Gradients, or ScoreGradients
