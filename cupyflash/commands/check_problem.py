"""What ``cupyflash check`` computes beside attention: an operation, its passes, its data."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy

from ..testing import cast, to_library

EPS = 1e-5  # of the norms


class Check(Protocol):
    """Knows right results by name."""

    def check(self, **results: Any) -> None:
        """Print what was compared; AssertionError where a result is wrong."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """A call that is verified and timed.

    Attributes:
        name: "fwd", "bwd" or "step".
        call: of no argument; returns the results in the order of ``results``.
        results: their names.
        work: FLOPs, or bytes that are read and written at least.
        unit: of the work, "FLOP" or "B".
    """

    name: str
    call: Callable[[], tuple[Any, ...]]
    results: tuple[str, ...]
    work: float
    unit: str


@dataclasses.dataclass(frozen=True)
class Operation:
    """A problem: its passes and what is right; ``shape`` is a text."""

    name: str
    dtype: str
    shape: str
    passes: tuple[Pass, ...]
    exact: Check


class Maker:
    """Seeded arrays of "numpy" or "cupy"."""

    def __init__(self, library: str) -> None:
        self.library = library
        self._rng = numpy.random.default_rng(0)

    def normal(self, dtype: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Any:
        """Normal random numbers."""
        values = scale * self._rng.standard_normal(shape, "float32") + mean
        return cast(values.astype("float32"), dtype, self.library)

    def vector(self, dtype: str, size: int) -> Any:
        """The weight of a norm."""
        return self.normal(dtype, size, scale=0.2, mean=1.0)

    def matrix(self, dtype: str, rows: int, columns: int) -> Any:
        """Weights whose products are about as large as what is multiplied."""
        return self.normal(dtype, rows, columns, scale=columns**-0.5)

    def integers(self, values: Any) -> Any:
        """int32."""
        return to_library(numpy.asarray(values, "int32"), self.library)
