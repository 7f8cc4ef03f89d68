"""The arrays and the options of a projection, as all modules of this topic pass them on."""

from typing import NamedTuple

from ...runtime.array import Array


class Arrays(NamedTuple):
    """The arrays of a projection, or with a down_weight those of an MLP, which is two projections.

    See `cupyflash.linear`, `cupyflash.mlp` and `cupyflash.qkv_projection`. ``weight``, ``bias`` and
    the norm are those of the first projection; ``residual`` is added to the last.
    """

    x: Array
    weight: Array
    gate_weight: Array | None = None
    bias: Array | None = None
    gate_bias: Array | None = None
    residual: Array | None = None
    norm_weight: Array | None = None
    norm_bias: Array | None = None
    cos: Array | None = None
    sin: Array | None = None
    positions: Array | None = None
    down_weight: Array | None = None
    down_bias: Array | None = None

    def first(self) -> "Arrays":
        """The arrays of the first projection of an MLP."""
        return self._replace(residual=None, down_weight=None, down_bias=None)

    def second(self, hidden: Array) -> "Arrays":
        """The arrays of the second, after which no activation follows."""
        return Arrays(hidden, self.down_weight, bias=self.down_bias, residual=self.residual)


class Options(NamedTuple):
    """The options of a projection.

    Attributes:
        eps, rms: of the norm.
        interleaved: whether pairs of the rotary embedding are neighbours.
        heads: of q, and of k; both 0 where there are none.
    """

    activation: str = "none"
    eps: float = 1e-5
    rms: bool = False
    interleaved: bool = False
    heads: tuple[int, int] = (0, 0)
