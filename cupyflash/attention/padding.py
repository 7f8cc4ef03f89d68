"""Head dims that the kernels do not take, by copies of the arrays with columns of zeros behind.

Kernels have one head_dim, a multiple of 8, for q, k, v and out. Columns of zeros in q and k change
no score, and those of v only give columns of zeros in out: attention of the wider arrays, at the
scale of the true head_dim, is attention of the arrays in its first columns. So are the gradients.
"""

from typing import Any, NamedTuple

from ..runtime.array import Array, View
from .extras import Gradients
from .options import Options
from .problem import Problem


class Padding(NamedTuple):
    """Stands for a plan where there is none: how to make a call of one that the kernels take.

    Attributes:
        width: head_dim of the kernels.
        head_dim: of q and k.
        head_dim_v: of v and out.
        options: with the scale of the true head_dim.
    """

    width: int
    head_dim: int
    head_dim_v: int
    options: Options

    @classmethod
    def of(cls, problem: Problem, options: Options) -> "Padding":
        """That of a problem which `needs_padding`."""
        options = options._replace(scale=problem.shape.scale)
        return cls(problem.shape.head_dim, *problem.head_dims, options)

    def widen(self, library: Any, *arrays: Array) -> list[Array]:
        """Copies of ``width`` columns; arrays that have them are taken as they are."""
        return [
            x if x.shape[-1] == self.width else library.with_columns(self.width, x) for x in arrays
        ]

    def narrow(self, out: Array) -> Array:
        """View of the columns of a result that v has."""
        return out[..., : self.head_dim_v]

    def narrow_gradients(self, gradients: Gradients) -> Gradients:
        """Views of the columns that q, k and v have."""
        dq, dk, dv, *others = gradients
        return Gradients(
            dq[..., : self.head_dim], dk[..., : self.head_dim], self.narrow(dv), *others
        )


def result_strides(library: Any, shape: tuple[int, ...], width: int, like: View) -> tuple[int, ...]:
    """Of a result of this shape in memory of ``width`` columns, allocated like an input."""
    wide = (*shape[:-1], width)
    strides = like.strides
    if like.shape[-1] != width:  # the input itself is copied first
        strides = library.strides_of_empty(wide, like)
    return library.strides_of_empty(wide, like._replace(shape=wide, strides=strides))
