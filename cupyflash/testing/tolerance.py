"""The tolerance rule.

The error against float64 is at most twice the error of the same formula computed in the same dtype
(the yardstick), plus rounding: one last place of the largest result in its dtype, and one float32
last place of the largest sum of magnitudes behind a result, since the yardstick may have been lucky
where few numbers are compared or where terms cancel. No tolerance is set by hand, so no test can be
loosened.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy

from ..runtime.array import Array, array_namespace
from .inputs import to_library

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def dtype_name(x: Any) -> str:
    """The dtype of any array, as NumPy and ml_dtypes call it."""
    return str(x.dtype).removeprefix("torch.")


def numpy_dtype(name: str) -> Any:
    """The NumPy dtype of this name; ml_dtypes has bfloat16."""
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return numpy.dtype(name)


def to_float64(array: Any) -> Array:
    """Any array in float64: a NumPy array, or a CuPy array if a GPU holds and can multiply it."""
    if type(array).__module__.partition(".")[0] != "torch":
        return where_matrices_multiply(array).astype("float64")
    array = array.detach().double()
    if array.device.type == "cpu":
        return array.numpy()
    import cupy

    return where_matrices_multiply(cupy.from_dlpack(array))


def to_numpy64(array: Any) -> numpy.ndarray:
    """Any array as a NumPy array in float64."""
    array = to_float64(array)
    return array if isinstance(array, numpy.ndarray) else array.get()


def where_matrices_multiply(array: Any) -> Any:
    """A CuPy array as NumPy array where CuPy has no cuBLAS, as in the light install; else as is."""
    if array_namespace(array) is numpy or _cupy_multiplies():
        return array
    return array.get()


@functools.cache
def _cupy_multiplies() -> bool:
    import cupy

    try:
        return bool((cupy.eye(2) @ cupy.eye(2))[0, 0] == 1)
    except (ImportError, RuntimeError, OSError):
        return False


class Comparison(NamedTuple):
    """One result beside float64.

    Attributes:
        error: the largest; NaN where nothing could be compared.
        text: what was compared.
        failure: the text where the result is wrong, else "".
    """

    error: float = 0.0
    allowed: float = 0.0
    text: str = ""
    failure: str = ""

    @property
    def closeness(self) -> float:
        """The share of the tolerance that the error takes."""
        return self.error / self.allowed if self.allowed else self.error


def assert_close_to_float64(
    actual: Any, exact: Any, yardstick: Any, dtype: str, name: str, *, terms: float = 0.0
) -> None:
    """Compare with `compare_with_float64`, and print what was compared.

    Raises:
        AssertionError: the result is wrong.
    """
    found = compare_with_float64(actual, exact, yardstick, dtype, name, terms=terms)
    print(found.text)
    assert not found.failure, found.failure


def wrong(text: str) -> Comparison:
    """A result that cannot be compared."""
    return Comparison(math.nan, math.nan, text, text)


def compare_with_float64(
    actual: Any, exact: Any, yardstick: Any, dtype: str, name: str, *, terms: float = 0.0
) -> Comparison:
    """Compare one result with float64.

    It is wrong if shapes differ, with a NaN or an infinity in the wrong place, and if the largest
    error is beyond 2 * (largest error of yardstick) + rounding.

    Args:
        actual: the result under test, of any library.
        exact: the same in float64, of any library.
        yardstick: the same computed in ``dtype`` throughout; its error sets the tolerance.
        dtype: of the result, or the coarser one that its own inputs were rounded to.
        name: of the result, for messages.
        terms: the largest sum of magnitudes behind a result.
    """
    if tuple(actual.shape) != tuple(exact.shape):
        return wrong(f"{name}: shape must be {tuple(exact.shape)}, got {tuple(actual.shape)}")
    if 0 in exact.shape:
        return Comparison()
    xp, (actual, exact, yardstick) = _alike(actual, exact, yardstick)
    error, yardstick_error = _error(xp, actual, exact), _error(xp, yardstick, exact)
    magnitude = xp.where(xp.isfinite(exact), xp.abs(exact), 0).max()
    rounding = EPSILON[dtype] * float(magnitude) + EPSILON["float32"] * terms
    allowed = 2 * float(yardstick_error.max()) + rounding
    if not numpy.isfinite(allowed):
        return wrong(f"{name}: the yardstick itself is not finite")
    worst = numpy.unravel_index(int(error.argmax()), error.shape)
    index = tuple(int(i) for i in worst)
    message = (
        f"{name}: max error {float(error[index]):.3g}, allowed {allowed:.3g} (of that rounding "
        f"{rounding:.3g}), worst at {index}: got {float(actual[index]):.6g}, "
        f"float64 {float(exact[index]):.6g}; "
        f"{int((error > allowed).sum())} of {math.prod(error.shape)} beyond"
    )
    largest = float(error[index])
    return Comparison(largest, allowed, message, "" if largest <= allowed else message)


def _alike(*arrays: Any) -> tuple[Any, list[Any]]:
    """Arrays in float64 in one library, and that: torch on its device, CuPy or NumPy."""
    of_torch = all(type(x).__module__.partition(".")[0] == "torch" for x in arrays)
    if of_torch and len({x.device for x in arrays}) == 1:
        import torch

        return torch, [x.detach().double() for x in arrays]
    arrays = [to_float64(x) for x in arrays]
    if any(isinstance(x, numpy.ndarray) for x in arrays):
        arrays = [to_numpy64(x) for x in arrays]
    return array_namespace(arrays[0]), arrays


def _error(xp: Any, actual: Any, exact: Any) -> Any:
    """|actual - exact|: 0 where both are the same infinity, inf where actual is NaN."""
    same = actual == exact
    error = xp.abs(xp.where(same, 0, actual) - xp.where(same, 0, exact))
    return xp.where(xp.isnan(error), xp.inf, error)


class Result(NamedTuple):
    """The requirements on one result.

    Attributes:
        exact: in float64.
        yardstick: the same formula computed in the dtype of the inputs.
        dtype: of the result.
        terms: the largest sum of magnitudes behind it.
        rounded: the coarser dtype that what it is computed from was rounded to, if there is one.
    """

    exact: Any
    yardstick: Any
    dtype: str
    terms: float = 0.0
    rounded: str | None = None

    def __add__(self, other: "Result") -> "Result":
        """The requirements on the sum of two results whose errors are independent."""
        return self._replace(
            exact=self.exact + other.exact,
            yardstick=to_float64(self.yardstick) + to_float64(other.yardstick),
            terms=math.hypot(self.terms, other.terms),
        )


@dataclasses.dataclass(frozen=True)
class Expected:
    """The results of an operation by name; `expected` and its like make it."""

    results: dict[str, Result]

    def check(self, **actual: Any) -> None:
        """Check any of the results, printing what was compared; raises AssertionError."""
        for name, x in actual.items():
            (found,) = self.compare(**{name: x})
            print(found.text)
            assert not found.failure, found.failure

    def compare(self, **actual: Any) -> list[Comparison]:
        """A comparison of each of these results."""
        return [self._compare(name, x) for name, x in actual.items()]

    def _compare(self, name: str, x: Any) -> Comparison:
        exact, yardstick, dtype, terms, rounded = self.results[name]
        if dtype_name(x) != dtype:
            return wrong(f"{name}: dtype must be {dtype}, got {dtype_name(x)}")
        return compare_with_float64(x, exact, yardstick, rounded or dtype, name, terms=terms)


def poison_free_memory(library: str, device: str, sizes: list[int]) -> None:
    """Leave NaN in freed blocks of these sizes (bytes), which the allocator hands out next.

    Every byte is 0xFF, a NaN in each floating dtype: a kernel that leaves a result unwritten shows.
    """
    block = [to_library(numpy.full(size, 0xFF, "uint8"), library, device) for size in sizes]
    del block
