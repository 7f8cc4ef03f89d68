"""Types of the public functions of `group_norm.py`: how a result depends on the options.

The first overload of a function is its whole signature; the others leave options to ``**options``.
"""

from typing import Any, Literal, TypeVar, overload

from ...runtime.array import ArrayLike, ArrayT

ArrayU = TypeVar("ArrayU", bound=ArrayLike)
_Activation = Literal["silu", "mish", "gelu", "gelu_tanh"] | None

@overload
def group_norm(
    x: ArrayT,
    num_groups: int,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    activation: _Activation = None,
    return_stats: Literal[False] = False,
) -> ArrayT: ...
@overload
def group_norm(
    x: ArrayT,
    num_groups: int,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    activation: _Activation = None,
    return_stats: Literal[True],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def group_norm(
    x: ArrayT,
    num_groups: int,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    activation: _Activation = None,
    return_stats: bool,
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
@overload
def group_norm_backward(
    dout: ArrayLike,
    x: ArrayT,
    weight: ArrayU,
    bias: ArrayU,
    stats: ArrayLike,
    *,
    activation: _Activation = None,
) -> tuple[ArrayT, ArrayU, ArrayU]: ...
@overload
def group_norm_backward(
    dout: ArrayLike,
    x: ArrayT,
    weight: None,
    bias: None,
    stats: ArrayLike,
    *,
    activation: _Activation = None,
) -> tuple[ArrayT, None, None]: ...
@overload
def group_norm_backward(
    dout: ArrayLike,
    x: ArrayT,
    weight: ArrayLike | None,
    bias: ArrayLike | None,
    stats: ArrayLike,
    *,
    activation: _Activation = None,
) -> tuple[ArrayT, Any, Any]: ...
