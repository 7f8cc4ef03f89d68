"""Types of the public functions of `norm.py`: how a result depends on the options.

The first overload of a function is its whole signature; the others leave options to ``**options``.
"""

from typing import Any, Literal, TypedDict, TypeVar, overload

from typing_extensions import Unpack

from ...runtime.array import ArrayLike, ArrayT

ArrayU = TypeVar("ArrayU", bound=ArrayLike)

class _NormOptions(TypedDict, total=False):
    eps: float
    dropout_p: float
    dropout_seed: int | ArrayLike | None

@overload
def layer_norm(
    x: ArrayT,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: None = None,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
    return_stats: Literal[False] = False,
) -> ArrayT: ...
@overload
def layer_norm(
    x: ArrayT,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayU,
    return_stats: Literal[False] = False,
    **options: Unpack[_NormOptions],
) -> tuple[ArrayT, ArrayU]: ...
@overload
def layer_norm(
    x: ArrayT,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayU,
    return_stats: Literal[True],
    **options: Unpack[_NormOptions],
) -> tuple[ArrayT, ArrayU, ArrayT]: ...
@overload
def layer_norm(
    x: ArrayT,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: None = None,
    return_stats: Literal[True],
    **options: Unpack[_NormOptions],
) -> tuple[ArrayT, ...]: ...
@overload
def layer_norm(
    x: ArrayT,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    return_stats: bool = False,
    **options: Unpack[_NormOptions],
) -> ArrayT | tuple[Any, ...]: ...
@overload
def rms_norm(
    x: ArrayT,
    weight: ArrayLike | None = None,
    *,
    residual: None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
    return_stats: Literal[False] = False,
) -> ArrayT: ...
@overload
def rms_norm(
    x: ArrayT,
    weight: ArrayLike | None = None,
    *,
    residual: ArrayU,
    return_stats: Literal[False] = False,
    **options: Unpack[_NormOptions],
) -> tuple[ArrayT, ArrayU]: ...
@overload
def rms_norm(
    x: ArrayT,
    weight: ArrayLike | None = None,
    *,
    residual: ArrayU,
    return_stats: Literal[True],
    **options: Unpack[_NormOptions],
) -> tuple[ArrayT, ArrayU, ArrayT]: ...
@overload
def rms_norm(
    x: ArrayT,
    weight: ArrayLike | None = None,
    *,
    residual: None = None,
    return_stats: Literal[True],
    **options: Unpack[_NormOptions],
) -> tuple[ArrayT, ...]: ...
@overload
def rms_norm(
    x: ArrayT,
    weight: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    return_stats: bool = False,
    **options: Unpack[_NormOptions],
) -> ArrayT | tuple[Any, ...]: ...
@overload
def layer_norm_backward(
    dout: ArrayT,
    x: ArrayLike,
    weight: ArrayU,
    stats: ArrayLike,
    *,
    dresidual: ArrayLike | None = None,
) -> tuple[ArrayT, ArrayU, ArrayU]: ...
@overload
def layer_norm_backward(
    dout: ArrayT,
    x: ArrayLike,
    weight: None,
    stats: ArrayLike,
    *,
    dresidual: ArrayLike | None = None,
) -> tuple[ArrayT, None, None]: ...
@overload
def layer_norm_backward(
    dout: ArrayT,
    x: ArrayLike,
    weight: ArrayLike | None,
    stats: ArrayLike,
    *,
    dresidual: ArrayLike | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
) -> tuple[Any, ...]: ...
@overload
def rms_norm_backward(
    dout: ArrayT,
    x: ArrayLike,
    weight: ArrayU,
    stats: ArrayLike,
    *,
    dresidual: ArrayLike | None = None,
) -> tuple[ArrayT, ArrayU]: ...
@overload
def rms_norm_backward(
    dout: ArrayT,
    x: ArrayLike,
    weight: None,
    stats: ArrayLike,
    *,
    dresidual: ArrayLike | None = None,
) -> tuple[ArrayT, None]: ...
@overload
def rms_norm_backward(
    dout: ArrayT,
    x: ArrayLike,
    weight: ArrayLike | None,
    stats: ArrayLike,
    *,
    dresidual: ArrayLike | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | ArrayLike | None = None,
) -> tuple[Any, ...]: ...
