"""Types of the public functions of `triangle.py`: how a result depends on the options.

The first overload of a function is its whole signature; the others leave options to ``**options``.
"""

from typing import Literal, overload

from ...runtime.array import ArrayLike, ArrayT

@overload
def triangle_attention(
    q: ArrayT,
    k: ArrayLike,
    v: ArrayLike,
    bias: ArrayLike,
    mask: ArrayLike | None = None,
    scale: float | None = None,
    return_aux: Literal[False] = False,
) -> ArrayT: ...
@overload
def triangle_attention(
    q: ArrayT,
    k: ArrayLike,
    v: ArrayLike,
    bias: ArrayLike,
    mask: ArrayLike | None = None,
    scale: float | None = None,
    *,
    return_aux: Literal[True],
) -> tuple[ArrayT, ArrayT, None]: ...
@overload
def triangle_attention(
    q: ArrayT,
    k: ArrayLike,
    v: ArrayLike,
    bias: ArrayLike,
    mask: ArrayLike | None = None,
    scale: float | None = None,
    return_aux: bool = False,
) -> ArrayT | tuple[ArrayT, ArrayT, None]: ...
