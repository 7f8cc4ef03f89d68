"""Head dims that the kernels do not take: copies with more columns."""

from typing import Any, NamedTuple

from ...runtime.array import Array
from .options import Gradients, Options
from .problem import Problem


class Padding(NamedTuple):
    """Stands for the plan of a head dim that the kernels do not take: copies with more columns.

    Kernels have one head_dim, a multiple of 8, for q, k, v and out, but for those of backends that
    do not pad (`Backend.pads`).
    Columns of zeros in q and k change no score, and those of v only give columns of zeros in out:
    attention of the wider arrays, at the scale of the true head_dim, is attention of the arrays in
    its first columns. So are the gradients.

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
        """Makes the padding of a problem which `needs_padding`."""
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

    def narrow_gradients(self, gradients: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        """Views of the columns that q, k and v have; the other gradients are unchanged."""
        dq, dk, dv, dbias, dsinks, *of_captures = gradients
        narrow = dq[..., : self.head_dim], dk[..., : self.head_dim], self.narrow(dv)
        return (*Gradients(*narrow, dbias, dsinks), *of_captures)
