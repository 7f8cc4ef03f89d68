"""The tolerance rule for the projections: float64, and a framework's separate operations.

The yardstick computes the norm, each product with its bias, the activation, the product with the
gate, each step of the rotary embedding and the sum with the residual one after the other: in
float32 inside, each result rounded to the dtype.
"""

from typing import Any

import numpy

from cupyflash.linear.reference import Arrays, Options, project
from cupyflash.norm.reference import ACTIVATIONS, norm
from cupyflash.testing.norms import Array, ExpectedNorm, numpy_dtype, to_numpy64

LARGEST_SLOPE = 1.2  # of an activation


def expected_projection(arrays: Arrays, options: Options, down: Arrays | None = None) -> Any:
    """`cupyflash.linear` or `cupyflash.qkv_projection` ("out"); with ``down`` an MLP.

    Args:
        arrays: of any library.
        down: of the second projection; its x does not count.
    """
    dtype = _dtype_of(arrays.x)
    wide, narrow = _converted(arrays, wide=True), _converted(arrays, wide=False)
    rounded = lambda y: y.astype(numpy_dtype(dtype)).astype("float32")  # noqa: E731
    exact, baseline = project(wide, options), project(narrow, options, rounded)
    terms = _terms(wide, options)
    if down is not None:
        wide = _converted(down._replace(x=None), wide=True)._replace(x=exact)
        narrow = _converted(down._replace(x=None), wide=False)._replace(x=baseline)
        exact, baseline = project(wide, Options()), project(narrow, Options(), rounded)
        terms = _terms(wide, Options())
    largest = float(terms.max()) if terms.size else 0.0
    return ExpectedNorm({"out": (exact, baseline, dtype, largest)})


def _dtype_of(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _converted(arrays: Arrays, wide: bool) -> Arrays:
    """NumPy arrays in float64, or in their own dtypes."""

    def convert(name: str, x: Any) -> Array | None:
        if x is None or name == "positions":
            return x if x is None else to_numpy64(x).astype("int64")
        values = to_numpy64(x)
        return values if wide else values.astype(numpy_dtype(_dtype_of(x)))

    return Arrays(*(convert(name, x) for name, x in arrays._asdict().items()))


def _terms(arrays: Arrays, options: Options) -> Array:
    """Magnitudes behind each result."""
    x = arrays.x
    if arrays.norm_weight is not None:
        x = norm(options.rms, x, arrays.norm_weight, arrays.norm_bias, options.eps)[0]
    terms = _sum_of_magnitudes(x, arrays.weight, arrays.bias)
    if arrays.gate_weight is not None:
        no_gate = arrays._replace(x=x, norm_weight=None, gate_weight=None, residual=None)
        gate = project(
            no_gate._replace(weight=arrays.gate_weight, bias=arrays.gate_bias), Options()
        )
        of_gate = _sum_of_magnitudes(x, arrays.gate_weight, arrays.gate_bias)
        up = numpy.abs(project(no_gate, Options()))
        activated = numpy.abs(ACTIVATIONS[options.activation][0](gate))
        terms = activated * terms + LARGEST_SLOPE * of_gate * up
    else:
        terms = LARGEST_SLOPE * terms
    if arrays.cos is not None:
        terms = 2 * terms
    return terms if arrays.residual is None else terms + numpy.abs(arrays.residual)


def _sum_of_magnitudes(x: Array, weight: Array, bias: Array | None) -> Array:
    terms = numpy.abs(x) @ numpy.abs(weight).T
    return terms if bias is None else terms + numpy.abs(bias)
