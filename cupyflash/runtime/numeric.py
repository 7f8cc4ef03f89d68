"""NumPy or CuPy: what the references compute with."""

from typing import Any

Array = Any  # numpy.ndarray or cupy.ndarray


def array_namespace(array: Array) -> Any:
    """The module whose functions work on ``array``: NumPy, or CuPy for a CuPy array."""
    if type(array).__module__.partition(".")[0] == "cupy":
        import cupy

        return cupy
    import numpy

    return numpy


def compute_dtype(array: Array) -> str:
    """The dtype of sums over an array: float64 of its own kind, else float32."""
    return "float64" if array.dtype == "float64" else "float32"
